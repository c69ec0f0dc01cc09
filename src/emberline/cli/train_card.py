"""`emberline train card`: a draft's model card from the files of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emberline.cli.settings import fail, one_line_errors

CARD = "README.md"


def card(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    title: Annotated[str, typer.Option(help="First line of the card.")] = "A draft",
    draft: Annotated[
        Path | None,
        typer.Option(help="Folder of the draft, which gets the card; the run's if absent."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Token rows it was trained on; the run's if absent.")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="What `emberline eval --json` wrote.")
    ] = None,
    notes: Annotated[Path | None, typer.Option(help="Markdown for the end of the card.")] = None,
) -> None:
    """Write a draft's model card: data, steps, seconds, acceptance, calibration."""
    with one_line_errors():
        from emberline.train.card import read_card

        try:
            folder = draft or run / "draft"
            text = notes.read_text(encoding="utf-8") if notes else ""
            found = read_card(run, title, data, evaluation, folder, text)
            (folder / CARD).write_text(found.markdown(), encoding="utf-8")
        except (ValueError, OSError) as problem:
            fail(" ".join(str(problem).split()))
    typer.echo(f"{folder / CARD}: written")
