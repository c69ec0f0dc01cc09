"""`emberline export`: a trained draft as a checkpoint of a public dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from emberline.cli.settings import fail, one_line_errors

Form = Literal["deepspec", "speculators", "gguf", "zlab", "int8"]
Dtype = Literal["bfloat16", "float32"]


def export(
    out: Annotated[Path, typer.Argument(help="Folder to write; a .gguf file for --format gguf.")],
    source: Annotated[
        Path | None,
        typer.Option(
            help="checkpoint.pt, run folder, or a draft of any dialect; the shipped one if absent."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The target: folder, .gguf file or id; the embedded model if absent."),
    ] = None,
    form: Annotated[
        Form,
        typer.Option("--format", help="Who is to read it; int8 is compact, for this engine."),
    ] = "deepspec",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the matrices; bfloat16 if absent.")
    ] = None,
) -> None:
    """Write a draft as a checkpoint of a public dialect."""
    if (out.suffix == ".gguf") != (form == "gguf"):
        what = "a .gguf file" if form == "gguf" else "a folder"
        fail(f"--format {form} writes {what}, not {out}")
    if form == "int8" and dtype is not None:
        fail("--format int8 has a dtype of its own: leave --dtype out")
    with one_line_errors():
        from emberline.engine.build import model_depth
        from emberline.hub import resolve_draft, resolve_model
        from emberline.train.convert import convert, open_draft

        try:
            target = resolve_model(model)
            found = source or resolve_draft(None, target)
            if found is None:
                raise ValueError("no draft comes with this model: give --source")
            checkpoint = open_draft(_in_run(found), model_depth(target.path))
            file = Path(model) if model is not None and target.kind == "gguf" else None
            written = convert(out, checkpoint, form, dtype or "bfloat16", target.path, file)
        except (ValueError, FileNotFoundError) as problem:
            fail(" ".join(str(problem).split()))
    typer.echo(f"{out}: {form} draft, {written.stat().st_size / 1e6:.1f} MB")


def _in_run(source: Path) -> Path:
    """The checkpoint of a run's folder; anything else is what it is."""
    from emberline.train.trainer import CHECKPOINT

    return source / CHECKPOINT if (source / CHECKPOINT).is_file() else source
