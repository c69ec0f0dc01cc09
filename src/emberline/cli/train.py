"""`emberline train`: a draft for a target, from nothing but the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from emberline.cli.settings import fail, one_line_errors

if TYPE_CHECKING:
    from emberline.train.pipeline import Recipe

Head = Literal["vanilla", "gated", "rnn"]


def train(
    out: Annotated[Path, typer.Argument(help="Folder of the run; an unfinished run is resumed.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Token rows of an earlier run; made anew if absent.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: a GPU if there is one.")
    ] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 4000,
    seqs: Annotated[int, typer.Option(min=1, help="Rows in a step.")] = 32,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks cut out of each row.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Batches of text to sample.")] = 8,
    sample_batch: Annotated[int, typer.Option(min=1, help="Rows sampled together.")] = 4096,
    seq_len: Annotated[int, typer.Option(min=16, help="Tokens of a row.")] = 512,
    held_out: Annotated[int, typer.Option(min=0, help="Rows kept aside to measure on.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft.")] = 3,
    block_size: Annotated[int, typer.Option(min=1, help="Drafts a block.")] = 7,
    taps: Annotated[
        str | None, typer.Option(help="Target layers to read, 0-based: 1,8,14,21,27.")
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Token in the open slots; an unused special one if absent.")
    ] = None,
    markov_rank: Annotated[int, typer.Option(min=0, help="Rank of the Markov head.")] = 64,
    markov_head: Annotated[Head, typer.Option(help="Kind of the Markov head.")] = "vanilla",
    dflash: Annotated[
        bool, typer.Option("--dflash", help="No Markov head, no confidence, CE alone.")
    ] = False,
    muon_lr: Annotated[float, typer.Option(help="Rate of the matrices.")] = 0.02,
    adam_lr: Annotated[float, typer.Option(help="Rate of heads and norms.")] = 2.5e-3,
    seed: Annotated[int, typer.Option(help="Of data, weights and batches.")] = 0,
) -> None:
    """Train a draft for a model on text that the model writes itself."""
    with one_line_errors():
        from emberline.train import config as settings
        from emberline.train.pipeline import Recipe

        try:
            changes: dict[str, Any] = {
                "num_hidden_layers": layers,
                "block_size": block_size,
                "target_layer_ids": _ids(taps),
                "mask_token_id": mask_token_id,
                "markov_rank": 0 if dflash else markov_rank,
                "markov_head_type": markov_head,
                "enable_confidence_head": not dflash,
            }
            recipe = Recipe(
                draft=changes,
                synthesis=settings.SynthesisConfig(rounds, sample_batch, seq_len, seed),
                training=settings.TrainConfig(
                    steps,
                    seqs,
                    anchors,
                    seed,
                    loss=settings.LossConfig(1.0, 0.0, 0.0) if dflash else settings.LossConfig(),
                    optim=settings.OptimConfig(muon_lr=muon_lr, adam_lr=adam_lr),
                ),
                held_out_rows=held_out,
            )
            _run(model, out, recipe, device, data)
        except (ValueError, FileNotFoundError) as problem:
            fail(" ".join(str(problem).split()))


def _ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--taps must be numbers with commas between, got {text!r}") from None


def _run(model: str | None, out: Path, recipe: Recipe, device: str, data: Path | None) -> None:
    import torch

    from emberline.hub import resolve_model
    from emberline.train.pipeline import train_draft

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = resolve_model(model).path
    with _progress(recipe.training.steps) as (say, report):
        draft = train_draft(folder, out, recipe, torch.device(device), data, say, report)
        say(f"draft written to {draft}")


@contextmanager
def _progress(steps: int) -> Iterator[tuple[Any, Any]]:
    """A bar with rate and time left on standard error, and a line for each report."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps, rate="")

        def say(text: str) -> None:
            progress.console.print(text, markup=False, highlight=False)

        def report(line: dict[str, Any]) -> None:
            numbers = (
                f"step {line['step']:>6} {line['split']:<8} ce {line['ce']:.3f} l1 {line['l1']:.3f}"
                f"  tokens a step: T=0 {line['length_t0']:.2f}, T=1 {line['length_t1']:.2f}"
            )
            say(numbers)
            if "steps_per_second" in line:
                rate = f"{line['steps_per_second']:.2f} steps/s"
                progress.update(task, completed=line["step"], rate=rate)

        yield say, report
