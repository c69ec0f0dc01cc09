"""Conformance of servers, seen from outside over HTTP: does what they report hold?

Nothing here imports the engine or the server: any server that speaks OpenAI's completions or the
native `/generate` can be audited, and ours is one of them.
"""
