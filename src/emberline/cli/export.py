"""`emberline export`: a trained draft as a checkpoint of a public dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from emberline.cli.settings import fail, one_line_errors

Form = Literal["full", "int8"]


def export(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    source: Annotated[
        Path | None,
        typer.Option(
            help="checkpoint.pt, run folder or draft folder; the shipped draft if absent."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The target: folder, .gguf file or id; the embedded model if absent."),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(help="full: bfloat16 with embedding and head; int8: compact, without."),
    ] = "full",
) -> None:
    """Write a trained draft as a checkpoint of a public dialect."""
    with one_line_errors():
        from emberline.hub import resolve_draft, resolve_model
        from emberline.train.export import read_draft, target_tables, write_compact, write_full
        from emberline.train.trainer import CHECKPOINT

        try:
            if source is None:
                folder = resolve_model(model)
                found = resolve_draft(None, folder)
                if found is None:
                    raise ValueError("no draft comes with this model: give --source")
                source = found
            elif (source / CHECKPOINT).is_file():
                source = source / CHECKPOINT
            config, tensors = read_draft(source)
            if form == "int8":
                write_compact(out, config, tensors)
            else:
                tables = target_tables(resolve_model(model).path, config)
                write_full(out, config, tensors, *tables)
        except (ValueError, FileNotFoundError) as problem:
            fail(" ".join(str(problem).split()))
    typer.echo(f"{out}: {form} draft, {_size(out):.1f} MB")


def _size(folder: Path) -> float:
    return (folder / "model.safetensors").stat().st_size / 1e6
