"""`emberline calibrate`: temperatures that turn a draft's confidences into true chances."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberline.cli.settings import check_outputs, engine_config, fail, one_line_errors
from emberline.config import DtypeName, SlotRule, TargetBackend

FEW_BLOCKS = 1000
"""Under so many blocks chance outweighs what a temperature can mend (docs/calibrate.md)."""

if TYPE_CHECKING:
    from emberline.cli.recording import Advance, Recipe
    from emberline.engine.trace import RequestTrace
    from emberline.verify.calibration import Calibration, Samples


def calibrate(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Draft checkpoint: folder or id.")] = None,
    draft_slot_rule: Annotated[
        SlotRule | None,
        typer.Option(help="What a block draft's slots predict; what its files say if absent."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines of turns, messages or prompt; questions from templates if absent."
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Answer each prompt at this temperature; repeatable. 0 and 1 if absent."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    limit: Annotated[int, typer.Option(min=2, help="Most prompts.")] = 64,
    holdout: Annotated[
        float,
        typer.Option(min=0.0, max=0.9, help="Share of the prompts to judge on, not to fit to."),
    ] = 0.25,
    out: Annotated[
        Path | None, typer.Option(help="File to write; the draft's calibration.json if absent.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Reliability diagrams to draw (PNG).")] = None,
    traces: Annotated[
        Path | None,
        typer.Option(help="File that keeps what was recorded; an unfinished one is gone on with."),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Weights, KV and computation.")] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto: a GPU if there is one.")
    ] = "auto",
    target_backend: Annotated[
        TargetBackend, typer.Option(help="Our fused decoder, or any model as transformers has it.")
    ] = "auto",
    max_num_reqs: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 16,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the CPU's kernels; all cores but one if absent."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, answers and the split.")] = 0,
) -> None:
    """Fit the temperatures of a draft's confidences, and judge them."""
    check_outputs(plot, out=out, traces=traces)
    config = engine_config(
        draft=draft,
        dtype=dtype,
        device=device,
        target_backend=target_backend,
        max_model_len=None,
        kv_tokens=None,
        max_num_reqs=max_num_reqs,
        threads=threads,
        draft_slot_rule=draft_slot_rule,
    )
    with one_line_errors():
        from emberline.cli.recording import Recipe, recorded
        from emberline.engine.trace import samples
        from emberline.hub import resolve_draft, resolve_model
        from emberline.verify.calibration import calibrate as fit_and_judge
        from emberline.verify.calibration import calibration_path

        target = resolve_model(model)
        folder = resolve_draft(draft, target)
        if folder is None:
            fail("no draft to calibrate: give --draft")
        out = out or calibration_path(folder)
        check_outputs(None, out=out)
        recipe = Recipe(
            model=target,
            draft=folder,
            prompts=prompts,
            temperatures=tuple(dict.fromkeys(temperature or (0.0, 1.0))),
            max_tokens=max_tokens,
            limit=limit,
            seed=seed,
            slot_rule=draft_slot_rule,
        )
        check_plan(recipe, holdout)
        with _progress() as advance:
            found = recorded(recipe, traces, config, advance)
        to_fit, to_judge = split(found, holdout, seed)
        fitted = samples(to_fit, recipe.num_draft_tokens)
        held_out = to_judge is not to_fit
        judged = samples(to_judge, recipe.num_draft_tokens) if held_out else fitted
        try:
            calibration = fit_and_judge(fitted, judged, recipe.summary())
        except ValueError as problem:
            fail(f"{problem}: raise --max-tokens or --limit")
        try:
            calibration.save(out)
        except OSError as problem:
            fail(f"{out}: cannot be written ({problem.strerror})")
    _print_table(calibration, judged, held_out=held_out)
    typer.echo(f"written: {out}")
    if plot is not None:
        from emberline.cli.reliability_plot import draw

        draw(calibration.temperatures, judged, plot)
        typer.echo(f"drawn: {plot}")


def check_plan(recipe: Recipe, holdout: float) -> None:
    """End the program now for what would be found to be too little after the recording."""
    if not recipe.has_confidence:
        fail(f"{recipe.draft}: has no confidence head: nothing to calibrate")
    drafts = recipe.num_draft_tokens
    least = drafts + 2  # the prompt's own token, and one more than the drafts in a verify step
    if recipe.max_tokens < least:
        fail(
            f"--max-tokens {recipe.max_tokens}: only an answer of {least} tokens has room for a "
            f"whole block of {drafts} drafts: give at least {least}"
        )
    names = {name for name, _, _ in recipe.requests()}
    if num_held(len(names), holdout) == len(names):
        fail(
            f"--holdout {holdout:g} of {len(names)} prompts leaves none to fit to: lower it, or "
            "give more prompts (--limit)"
        )


def num_held(num_prompts: int, holdout: float) -> int:
    """Prompts to judge on, of so many."""
    return round(holdout * num_prompts)


def split(
    traces: Sequence[RequestTrace], holdout: float, seed: int
) -> tuple[list[RequestTrace], list[RequestTrace]]:
    """Traces to fit to and to judge on, a prompt's on one side. `holdout` 0: the same are both."""
    names = sorted({trace.prompt for trace in traces})
    random.Random(seed).shuffle(names)
    held = set(names[: num_held(len(names), holdout)])
    if not held:
        everything = list(traces)
        return everything, everything
    return (
        [trace for trace in traces if trace.prompt not in held],
        [trace for trace in traces if trace.prompt in held],
    )


def _print_table(calibration: Calibration, judged: Samples, *, held_out: bool) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    columns = ("draft", "temperature", "ECE before", "ECE after", "AUC", "samples")
    table = Table(*columns, box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    counts = (~np.isnan(judged.logits)).sum(axis=0).tolist()
    rows = zip(
        calibration.temperatures,
        calibration.ece_before,
        calibration.ece_after,
        calibration.auc,
        counts,
        strict=True,
    )
    for position, (*figures, count) in enumerate(rows, start=1):
        shown = ("-" if math.isnan(figure) else f"{figure:.4f}" for figure in figures)
        table.add_row(str(position), *shown, str(count))
    before, after = (np.mean(e) for e in (calibration.ece_before, calibration.ece_after))
    table.add_row("mean", "", f"{before:.4f}", f"{after:.4f}", "", "", style="bold")
    console = Console()
    console.print(table)
    where = "prompts that the fit has not seen" if held_out else "the prompts that were fitted to"
    console.print(f"Survival, judged on {where}.", highlight=False)
    if calibration.num_samples < FEW_BLOCKS:
        console.print(
            f"Warning: fitted to {calibration.num_samples} blocks, which are few: the figures are "
            f"noise, and the fit may do harm. Use {FEW_BLOCKS} or more (--limit, --max-tokens).",
            highlight=False,
        )
    if after > before:
        console.print("It does not help here: fit to more prompts (--limit).", highlight=False)


@contextmanager
def _progress() -> Iterator[Advance]:
    """A bar of requests on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
