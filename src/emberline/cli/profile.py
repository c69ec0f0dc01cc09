"""`emberline profile`: what a step costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from emberline.cli.settings import (
    DrafterName,
    check_outputs,
    engine_config,
    fail,
    one_line_errors,
)
from emberline.config import DtypeName, LayoutKind, SlotRule, TargetBackend

if TYPE_CHECKING:
    from emberline.config import EngineConfig
    from emberline.verify.cost_profile import CostProfile

Format = Literal["native", "sglang", "sglang-additive", "tensorrt-llm", "tensorrt-llm-v2"]


def profile(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, .gguf file or Hugging Face id; the embedded model if absent."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft or small model: folder, .gguf file or id; or 'none'.")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Weights, KV and computation.")] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; auto: a GPU if there is one.")
    ] = "auto",
    target_backend: Annotated[
        TargetBackend, typer.Option(help="Our fused decoder, or any model as transformers has it.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of the CPU's kernels; all cores but one if absent.")
    ] = None,
    max_num_reqs: Annotated[
        int | None, typer.Option(help="Most requests of a step to measure.")
    ] = None,
    layout: Annotated[LayoutKind, typer.Option(help="How rows of a step are laid.")] = "compact",
    drafter: Annotated[
        DrafterName, typer.Option(help="auto: the draft checkpoint; ngram: from the text itself.")
    ] = "auto",
    draft_slot_rule: Annotated[
        SlotRule | None,
        typer.Option(help="What a block draft's slots predict; what its files say if absent."),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Drafts a block; the drafter's own if absent.")
    ] = None,
    keep: Annotated[
        bool, typer.Option(help="Keep the costs for later starts with the same settings.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="File to write (JSON).")] = None,
    file_format: Annotated[
        Format, typer.Option("--format", help="Of that file; all but native lose something.")
    ] = "native",
    plot: Annotated[Path | None, typer.Option(help="Picture to draw (its suffix: kind).")] = None,
) -> None:
    """Measure what a step costs on this machine. Whatever else runs is measured with it."""
    if file_format != "native" and out is None:
        fail("--format says how --out is written: give --out too")
    check_outputs(plot, out=out)
    config = engine_config(
        draft=draft,
        dtype=dtype,
        device=device,
        target_backend=target_backend,
        max_model_len=None,
        kv_tokens=None,
        max_num_reqs=max_num_reqs,
        threads=threads,
        layout=layout,
        planner="verify_all",  # measures nothing by itself
        num_draft_tokens=num_draft_tokens,
        draft_slot_rule=draft_slot_rule,
        drafter=drafter,
    )
    with one_line_errors():
        measured = _measured(model, draft, config)
    _print_tables(measured)
    if keep:
        from emberline import machine_costs

        typer.echo(f"Step costs: {machine_costs.keep(measured)}")
    if out is not None:
        from emberline.verify.cost_files import save_profile

        try:
            save_profile(out, measured, file_format)
        except OSError as problem:
            fail(f"--out {out}: cannot be written ({problem.strerror or problem})")
        typer.echo(f"written: {out}")
    if plot is not None:
        from emberline.cli.cost_plot import draw

        draw(measured, plot)
        typer.echo(f"drawn: {plot}")


def _measured(model: str | None, draft: str | None, config: EngineConfig) -> CostProfile:
    from emberline.engine.build import build_engine
    from emberline.hub import generation_stop_ids, resolve_draft, resolve_model
    from emberline.machine_costs import measure

    folder = resolve_model(model)
    checkpoint = resolve_draft(draft, folder) if config.speculation.drafter == "auto" else None
    stops = generation_stop_ids(folder.path)
    engine = build_engine(folder.path, checkpoint, config, eos_ids=stops, name=folder.name)
    try:
        return measure(engine, folder.path, checkpoint)
    except ValueError as problem:
        fail(str(problem))


def _print_tables(measured: CostProfile) -> None:
    from rich.console import Console

    console, facts, costs = Console(), measured.measured_on, measured.costs
    console.print(
        f"{facts.model}, {facts.dtype}, {facts.threads} threads on {facts.processor}, "
        f"{facts.context_length} tokens of context",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table("ms, all but drafting", "tokens", costs.target))
    if costs.draft:
        console.print(_table("ms, drafting", "drafts", costs.draft))


def _table(title: str, count: str, points: tuple[tuple[int, int, float], ...]) -> Any:
    """A row for each number of requests: counts and milliseconds, in pairs."""
    from rich.table import Table

    rows: dict[int, list[str]] = {}
    for num_reqs, amount, seconds in sorted(points):
        rows.setdefault(num_reqs, []).append(f"{amount}: {seconds * 1e3:.1f}")
    width = max(len(row) for row in rows.values())
    table = Table("requests", *[""] * width, title=f"{title}, by {count}", box=None)
    for num_reqs, row in rows.items():
        table.add_row(str(num_reqs), *row)
    return table
