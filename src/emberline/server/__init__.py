"""The HTTP server: OpenAI's routes over an async engine."""
