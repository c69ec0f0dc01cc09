"""`emberline eval`: how well drafts are accepted, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberline.cli.settings import check_outputs, engine_config, fail, one_line_errors
from emberline.config import DtypeName, EngineConfig, PlannerName, SlotRule, TargetBackend

if TYPE_CHECKING:
    from emberline.evaluate.measure import Advance, Plan, PromptSet
    from emberline.evaluate.report import Drafted, Grid
    from emberline.hub import ModelFolder

NGRAM = "ngram"
BY_CONFIDENCE: tuple[PlannerName, ...] = ("threshold", "causal_greedy", "lagged_top_k")


def eval(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Draft checkpoint (folder or id), or ngram; repeatable."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="What to call it in the tables; one for each --draft, in order."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines of turns, messages or prompt, or a folder of such sets."),
    ] = None,
    sets: Annotated[
        str | None, typer.Option(help="Sets of the folder, with commas between; all if absent.")
    ] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help="Prompts to take of each set; all if absent.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    temperatures: Annotated[
        str, typer.Option(help="Answer each prompt at these, with commas between.")
    ] = "0,1",
    planner: Annotated[
        PlannerName, typer.Option(help="How much of a block is verified; verify_all is all of it.")
    ] = "verify_all",
    threshold: Annotated[
        float | None, typer.Option(help="Least survival worth verifying (planner threshold).")
    ] = None,
    step_costs: Annotated[
        str | None, typer.Option(help="File of step costs for a planner that reads them.")
    ] = None,
    draft_slot_rule: Annotated[
        SlotRule | None,
        typer.Option(help="What a block draft's slots predict; what its files say if absent."),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Drafts a block; each drafter's own if absent.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="File for everything that was found.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="File for the tables (Markdown).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of lengths and rates (PNG).")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Weights, KV and computation.")] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto: a GPU if there is one.")
    ] = "auto",
    target_backend: Annotated[
        TargetBackend, typer.Option(help="Our fused decoder, or any model as transformers has it.")
    ] = "auto",
    max_num_reqs: Annotated[int, typer.Option(min=1, help="Answers that run together.")] = 16,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the CPU's kernels; all cores but one if absent."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of answers and standard errors.")] = 0,
) -> None:
    """Measure acceptance on prompt sets: tokens a step, rates by position, calibration."""
    check_outputs(plot, json=as_json, markdown=markdown)
    if sets is not None and (prompts is None or not prompts.is_dir()):
        fail("--sets picks sets of a folder: give one with --prompts, or leave it out")
    with one_line_errors():
        from emberline.evaluate.measure import Plan
        from emberline.hub import resolve_model

        plan = Plan(_sets(prompts, sets, first), _numbers(temperatures), max_tokens, seed)
        folder = resolve_model(model)
        chosen = _named(draft, name, folder)
        if planner in BY_CONFIDENCE:
            _check_confidences(chosen, folder, planner, draft_slot_rule)
        configs = {
            label: engine_config(
                draft=None if source == NGRAM else source,
                drafter="ngram" if source == NGRAM else "auto",
                dtype=dtype,
                device=device,
                target_backend=target_backend,
                max_model_len=None,
                kv_tokens=None,
                max_num_reqs=max_num_reqs,
                threads=threads,
                planner=planner,
                threshold=threshold,
                step_costs=step_costs,
                num_draft_tokens=num_draft_tokens,
                draft_slot_rule=draft_slot_rule,
            )
            for label, source in chosen.items()
        }
        found = [_measured(model, label, chosen[label], configs[label], plan) for label in chosen]
    _write(found, plan, planner, as_json, markdown, plot)


def _sets(prompts: Path | None, sets: str | None, first: int | None) -> tuple[PromptSet, ...]:
    from emberline.evaluate.measure import PromptSet, read_sets
    from emberline.prompts import Conversation

    if prompts is not None:
        return read_sets(prompts, sets.split(",") if sets is not None else None, first)
    from emberline.bench.own_prompts import PROMPTS

    return (PromptSet("built-in", tuple(Conversation.of(text) for text in PROMPTS[:first])),)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"--temperatures must be numbers with commas between, got {text!r}")


def _named(
    drafts: Sequence[str] | None, names: Sequence[str] | None, model: ModelFolder
) -> dict[str, str]:
    """What to call each draft, and where it comes from."""
    from emberline.hub import resolve_draft

    if not drafts:
        shipped = resolve_draft(None, model)
        if shipped is None:
            fail(f"{model.name} comes with no draft: give --draft (a checkpoint, or {NGRAM})")
        drafts = [str(shipped)]
    if names and len(names) != len(drafts):
        fail(f"{len(names)} --name for {len(drafts)} --draft: give one for each, or none")
    chosen: dict[str, str] = {}
    for source, label in zip(drafts, names or map(_label, drafts), strict=True):
        if source.lower() == "none":
            fail("--draft none: without drafts there is nothing to measure")
        if label in chosen:
            fail(f"two drafts are called {label}: tell them apart with --name")
        if source != NGRAM:
            resolve_draft(source, model)  # all are there before the first is measured
        chosen[label] = source
    return chosen


def _check_confidences(
    chosen: dict[str, str], model: ModelFolder, planner: PlannerName, rule: SlotRule | None
) -> None:
    """End the program now where a planner would verify everything for want of confidences."""
    from emberline.drafters.checkpoint import read_draft_config
    from emberline.engine.build import model_depth
    from emberline.hub import resolve_draft

    depth = model_depth(model.path)
    for label, source in chosen.items():
        path = None if source == NGRAM else resolve_draft(source, model)
        config = None if path is None else read_draft_config(path, rule, depth)
        if not getattr(config, "has_confidence", False):
            fail(
                f"--planner {planner} goes by confidences, and {label} has none: every draft would "
                "be verified; leave it out, or use verify_all"
            )


def _label(source: str) -> str:
    """The folder's name; a trained draft lies in `draft` of its run, which says more."""
    path = Path(source)
    return path.absolute().parent.name if path.name == "draft" else path.name


def _measured(
    model: str | None, label: str, source: str, config: EngineConfig, plan: Plan
) -> Drafted:
    from emberline.evaluate.figures import summarise
    from emberline.evaluate.measure import measure
    from emberline.evaluate.report import Drafted
    from emberline.llm import load_engine

    loaded = load_engine(model, None if source == NGRAM else source, config)
    engine = loaded.engine
    with _progress(label) as advance:
        answers = measure(engine, loaded.tokenizer, plan, advance)
    summaries = {
        temperature: summarise(
            [answer for answer in answers if answer.temperature == temperature],
            engine.max_draft_tokens,
            plan.seed,
        )
        for temperature in plan.temperatures
    }
    return Drafted(label, engine.info, summaries)


def _write(
    found: Sequence[Drafted],
    plan: Plan,
    planner: PlannerName,
    as_json: Path | None,
    markdown: Path | None,
    plot: Path | None,
) -> None:
    from emberline import __version__
    from emberline.evaluate import report

    grids = report.tables(found)
    _print(grids)
    counted = {part.name: len(part.conversations) for part in plan.sets}
    settings = {
        "emberline": __version__,
        "prompts": counted,
        "temperatures": list(plan.temperatures),
        "max_tokens": plan.max_tokens,
        "planner": planner,
        "seed": plan.seed,
    }
    blocks = "all drafts verified" if planner == "verify_all" else f"verified by {planner}"
    shown = ", ".join(f"{count} of {name}" for name, count in counted.items())
    note = (
        f"Prompts: {shown}; at most {plan.max_tokens} new tokens, {blocks}, seed {plan.seed}. "
        "± is one standard error, prompts resampled."
    )
    typer.echo(note)
    if as_json is not None:
        text = json.dumps(report.as_json(found, settings), indent=1, allow_nan=False)
        _save(as_json, text + "\n")
    if markdown is not None:
        _save(markdown, report.markdown(grids, [note]))
    if plot is not None:
        from emberline.evaluate.plot import draw

        draw(found, plot)
        typer.echo(f"drawn: {plot}")


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        fail(f"{path}: cannot be written ({problem.strerror})")
    typer.echo(f"written: {path}")


def _print(grids: Sequence[Grid]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for grid in grids:
        table = Table(box=None, title=grid.title, title_justify="left", title_style="bold")
        for number, name in enumerate(grid.header):
            table.add_column(escape(name), justify="right" if number else "left")
        for row in grid.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print()


@contextmanager
def _progress(label: str) -> Iterator[Advance]:
    """A bar of answers on standard error, once there is one to wait for."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task(label, total=None)

    def advance(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
