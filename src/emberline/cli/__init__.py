"""The command line: one file a verb. A verb's modules are imported when it is run, not before."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

COMMANDS = {
    "serve": "Serve a model over an OpenAI-compatible API.",
    "generate": "Answer one prompt in the terminal.",
    "train": "Train a draft for a model.",
    "export": "Write a trained draft as a checkpoint of a public dialect.",
    "eval": "Measure how well drafts are accepted, side by side.",
    "inspect": "Show what a draft is and how its files are read.",
    "calibrate": "Fit the temperatures of a draft's confidences.",
    "profile": "Measure what a step costs on this machine.",
    "bench": "Measure a server: bench serve.",
    "audit": "Prove a server's logprobs from outside.",
}


def make_app(verb: str | None) -> typer.Typer:
    """The application with `verb` ready to run; the others are there for the help page alone."""
    app = typer.Typer(
        name="emberline",
        help="DSpark block speculative decoding with exact logprobs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, summary in COMMANDS.items():
        command = getattr(import_module(f"{__name__}.{name}"), name) if name == verb else _absent
        if isinstance(command, typer.Typer):  # a verb with verbs of its own
            app.add_typer(command, name=name, help=summary)
        else:
            app.command(name, help=summary)(command)
    return app


def _absent() -> None:
    """Stands on the help page for a verb that was not asked for."""


def main() -> None:
    """The `emberline` command. One line and exit code 2 for what the user can put right."""
    arguments = sys.argv[1:]
    verb = next((word for word in arguments if not word.startswith("-")), None)
    try:
        make_app(verb)()
    except KeyboardInterrupt:
        sys.exit(130)
