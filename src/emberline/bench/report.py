"""A measurement for people and for programs: tables, notes, JSON. Computes no figure itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emberline.bench.client import RequestRecord
from emberline.bench.metrics import LevelRun, LevelSummary, e2e, tpot, ttft
from emberline.bench.session import Plan, Session
from emberline.bench.settings import ClosedLoop, Level, RandomPrompts

_LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
_COLUMNS = (
    "ok",
    "failed",
    "in flight\nmean (peak)",
    "requests/s",
    "output\ntokens/s",
    "total\ntokens/s",
    "tokens/s\nper user",
    "tokens\na step",
    "cached\ntokens",
)
_BUSY = 0.8  # a client that computes longer than this may be what is measured


def level_name(level: Level) -> str:
    """The level as the tables name it."""
    if isinstance(level, ClosedLoop):
        return str(level.concurrency)
    return f"{level.request_rate:g}/s"


def level_kind(level: Level) -> str:
    """What the level's number counts."""
    return "concurrency" if isinstance(level, ClosedLoop) else "rate"


def tables(summaries: Sequence[LevelSummary]) -> RenderableType:
    """Throughput, a row a level; latency, a row a level and metric; then what there is to say."""
    lines = [Text(line) for line in remarks(summaries)]
    parts: list[RenderableType] = [_throughput(summaries), Text(), _latency(summaries)]
    return Group(*parts, *([Text(), *lines] if lines else []))


def _throughput(summaries: Sequence[LevelSummary]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in (level_kind(summaries[0].level), *_COLUMNS):
        table.add_column(name, justify="right")
    for row in summaries:
        table.add_row(
            level_name(row.level),
            str(row.ok),
            Text(str(row.failed), style="bold red" if row.failed else ""),
            f"{row.in_flight_mean:.1f} ({row.in_flight_peak})",
            f"{row.requests_per_second:.2f}",
            _number(row.output_tokens_per_second, 1),
            _number(row.total_tokens_per_second, 1),
            _number(row.tokens_per_second_per_user, 1),
            _number(row.acceptance_length, 2),
            _number(row.cached_tokens, 0),
        )
    return table


def _latency(summaries: Sequence[LevelSummary]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(level_kind(summaries[0].level), justify="right")
    table.add_column("ms")
    for name in ("mean", "median", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for row in summaries:
        for place, (name, attribute) in enumerate(_LATENCIES):
            spread = getattr(row, attribute)
            values = (
                [spread.mean, spread.median, spread.p90, spread.p99, spread.max]
                if spread
                else 5 * [None]
            )
            label = "" if place else level_name(row.level)
            table.add_row(label, name, *(_number(value, 2) for value in values))
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def remarks(summaries: Sequence[LevelSummary]) -> list[str]:
    """What the tables cannot show: failures, what is unknown and why, where figures come from."""
    lines = []
    for row in summaries:
        name = f"{level_kind(row.level)} {level_name(row.level)}"
        for failure in row.failures:
            lines.append(f"{name}: {failure.count} failed with {failure.kind}: {failure.message}")
        if row.interrupted:
            lines.append(f"{name}: interrupted, {row.num_cut} requests in flight were cut")
        if isinstance(row.level, ClosedLoop) and row.in_flight_peak < row.level.concurrency:
            lines.append(f"{name}: too few requests to reach it, give more --num-requests")
        if row.ok and row.counted_by == "unknown":
            lines.append(
                f"{name}: the server gave no usage, output tokens are unknown (--tokenizer)"
            )
        if row.counted_by == "tokenizer":
            lines.append(f"{name}: output tokens are counted from the text by --tokenizer")
        if row.client_busy > _BUSY:
            busy = f"this program was busy {row.client_busy:.0%} of the time"
            lines.append(f"{name}: {busy} and may be what limits the figures")
    sources = sorted({row.acceptance.source for row in summaries if row.acceptance})
    shown = f"by {', '.join(sources)}" if sources else "not reported by the server"
    return [*lines, f"tokens a step: {shown}"]


def as_json(
    plan: Plan,
    session: Session,
    summaries: Sequence[LevelSummary],
    *,
    details: bool,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """Everything as one JSON object; keys and header values stay out of it."""
    server, request = asdict(plan.server), asdict(plan.request)
    del server["api_key"]
    server["headers"] = [name for name, _ in plan.server.headers]
    levels = []
    for run, summary in zip(session.runs, summaries, strict=True):
        level = {**asdict(summary), "level": _level_json(summary.level)}
        if summary.acceptance is not None:
            level["acceptance"]["rate"] = summary.acceptance.rate
        if details:
            level["requests"] = [_request_json(run, record) for record in run.records]
        levels.append(level)
    load = plan.load
    return {
        **provenance,
        "model": session.model.name,
        "listed": session.model.listed,
        "settings": {
            "server": server,
            "request": {**request, "extra_body": dict(plan.request.extra_body)},
            "load": {
                "num_requests": load.num_requests,
                "duration": load.duration,
                "warmup": load.warmup,
                "seed": load.seed,
            },
            "prompts": _prompts_json(plan, session),
        },
        "notes": list(session.prompts.notes),
        "levels": levels,
    }


def _level_json(level: Level) -> dict[str, Any]:
    if isinstance(level, ClosedLoop):
        return {"concurrency": level.concurrency}
    rate = level.request_rate
    return {"request_rate": "inf" if math.isinf(rate) else rate}  # JSON has no infinity


def _prompts_json(plan: Plan, session: Session) -> dict[str, Any]:
    drawn = asdict(plan.prompts) if isinstance(plan.prompts, RandomPrompts) else {}
    return {"kind": session.prompts.kind, "size": session.prompts.size, **drawn}


def _request_json(run: LevelRun, record: RequestRecord) -> dict[str, Any]:
    """One request; seconds from the level's start, chunk times too."""
    ok = record.failure is None
    return {
        "index": record.index,
        "start": record.start - run.origin,
        "sent": record.sent - run.origin,
        "end": record.end - run.origin,
        "ttft": ttft(record) if ok else None,
        "tpot": tpot(record, record.completion_tokens) if ok else None,
        "e2e": e2e(record) if ok else None,
        "chunk_times": [round(time - run.origin, 6) for time in record.chunk_times],
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "acceptance": asdict(record.acceptance) if record.acceptance else None,
        "failure": asdict(record.failure) if record.failure else None,
    }
