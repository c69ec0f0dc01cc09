"""`emberline train`: a draft for a target, from nothing but the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from emberline.cli.settings import fail, one_line_errors
from emberline.cli.train_card import card
from emberline.cli.train_data import synthesize

Head = Literal["vanilla", "gated", "rnn"]
Algorithm = Literal["dspark", "dflash", "eagle3"]
RUN = "run"

FLAGS = {
    "algorithm": ("draft.algorithm",),
    "layers": ("draft.num_hidden_layers",),
    "block_size": ("draft.block_size",),
    "taps": ("draft.target_layer_ids",),
    "mask_token_id": ("draft.mask_token_id",),
    "markov_rank": ("draft.markov_rank",),
    "markov_head": ("draft.markov_head_type",),
    "rounds": ("data.rounds",),
    "sample_batch": ("data.batch_size",),
    "seq_len": ("data.seq_len",),
    "held_out": ("data.held_out_rows",),
    "steps": ("train.steps",),
    "seqs": ("train.seqs_per_step",),
    "anchors": ("train.anchors",),
    "accumulate": ("train.accumulate",),
    "muon_lr": ("optim.muon_lr",),
    "adam_lr": ("optim.adam_lr",),
    "seed": ("data.seed", "train.seed"),
}
"""Which keys of the recipe an option sets."""


class _Group(TyperGroup):
    """A first word that names no command of its own is a run's folder: `train runs/mine`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the run's own command in front where it is meant."""
        if not args or args[0] == RUN or args[0] not in self.commands:
            args = [RUN, *args]
        return super().parse_args(ctx, args)


class _Run(TyperCommand):
    """The command without a name."""

    def make_context(self, info_name: str | None, args: list[str], **extra: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        """Show as `emberline train`."""
        return super().make_context("", args, **extra)


train = typer.Typer(cls=_Group, add_completion=False, rich_markup_mode=None)


@train.callback()
def _train() -> None:
    """Train a draft for a model."""


@train.command(RUN, cls=_Run)
def run(
    out: Annotated[Path, typer.Argument(help="Folder of the run; an unfinished run is resumed.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Recipe, a TOML file; the options below win over what it says."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Token rows made before; made anew in the run if absent.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: a GPU if there is one.")
    ] = "auto",
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Kind of the draft, with its losses; dspark.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights; 4000.")] = None,
    seqs: Annotated[
        int | None, typer.Option(help="Rows in a step, over all processes; 32.")
    ] = None,
    anchors: Annotated[int | None, typer.Option(help="Blocks cut out of each row; 128.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Parts that a step's rows are done in, to save memory; 1.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Batches of text to sample; 8.")] = None,
    sample_batch: Annotated[int | None, typer.Option(help="Rows sampled together; 4096.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row; 512.")] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Rows kept aside to measure on; 1024.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the draft; 3.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Drafts a block, or steps of an EAGLE-3 chain; 7.")
    ] = None,
    taps: Annotated[
        str | None, typer.Option(help="Target layers to read, 0-based: 1,8,14,21,27.")
    ] = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Token in the open slots; an unused special one if absent.")
    ] = None,
    markov_rank: Annotated[int | None, typer.Option(help="Rank of the Markov head; 64.")] = None,
    markov_head: Annotated[
        Head | None, typer.Option(help="Kind of the Markov head; vanilla.")
    ] = None,
    muon_lr: Annotated[float | None, typer.Option(help="Rate of the matrices; 0.02.")] = None,
    adam_lr: Annotated[float | None, typer.Option(help="Rate of heads and norms; 0.0025.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of data, weights and batches; 0.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any key of the recipe: optim.ema=0.999; repeatable."),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard's events too.")
    ] = False,
) -> None:
    """Train a draft for a model on text that the model writes itself.

    `emberline train synthesize` makes the text alone, from prompts of yours if you like.
    """
    given = {name: value for name, value in locals().items() if name in FLAGS}
    with one_line_errors():
        from emberline.train.recipe import merge, read_change, read_recipe

        try:
            flags = _flags(given)
            changes = merge([*map(read_change, change or []), *flags])
            recipe = read_recipe(config, changes)
            _train_draft(model, out, recipe, device, data, tensorboard)
        except (ValueError, OSError) as problem:
            fail(" ".join(str(problem).split()))
        except (RuntimeError, MemoryError) as problem:
            if not _wants_memory(problem):
                raise
            fail(
                "there is not enough memory: lower --sample-batch or --seq-len for the text, "
                "--seqs or --anchors for a step, or do a step in parts (--accumulate)"
            )


def _wants_memory(problem: Exception) -> bool:
    """Whether PyTorch was refused memory: on a CPU it says so in words alone."""
    import torch

    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(problem, kinds) or "can't allocate memory" in str(problem)


def _flags(given: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Options that were given, as changes to the recipe."""
    found = []
    for name, value in given.items():
        if value is None:
            continue
        for key in FLAGS[name]:
            section, _, entry = key.partition(".")
            found.append({section: {entry: _ids(value) if name == "taps" else value}})
    return found


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--taps must be numbers with commas between, got {text!r}") from None


def _train_draft(
    model: str | None, out: Path, recipe: Any, device: str, data: Path | None, tensorboard: bool
) -> None:
    from emberline.hub import resolve_model
    from emberline.train.pipeline import train_draft
    from emberline.train.preflight import read_device

    found = read_device(device)
    if data is not None and not data.is_dir():
        fail(f"--data {data}: no such folder: make one with `emberline train synthesize`")
    folder = resolve_model(model).path
    with _progress(recipe.training.steps) as (say, report):
        train_draft(folder, out, recipe, found, data, say, report, tensorboard)


@contextmanager
def _progress(steps: int) -> Iterator[tuple[Any, Any]]:
    """A bar with rate and time left on standard error, and a line for each report.

    It appears with the first line: of several processes only the one that leads has any.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task("", total=steps, rate="")

    def say(text: str) -> None:
        progress.start()
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

    try:
        yield say, report
    finally:
        if progress.live.is_started:
            progress.stop()


train.command("synthesize")(synthesize)
train.command("card")(card)
