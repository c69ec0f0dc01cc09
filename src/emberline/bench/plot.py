"""A picture of a measurement. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emberline.bench.metrics import LevelSummary
from emberline.bench.report import level_name


def plot_levels(summaries: Sequence[LevelSummary], picture: Path) -> None:
    """Throughput and latency against requests in flight, and throughput against speed per user.

    The suffix of `picture` says its format. A figure that is unknown is left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError, ValueError: the picture cannot be written, or not in that format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    throughput, latency, trade = figure.subplots(1, 3)
    load = [row.in_flight_mean for row in summaries]
    output = [row.output_tokens_per_second for row in summaries]
    users = [row.tokens_per_second_per_user for row in summaries]
    _line(throughput, load, output, "o-", "output")
    _line(throughput, load, [row.total_tokens_per_second for row in summaries], "o--", "total")
    for name, attribute in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        spreads = [getattr(row, attribute) for row in summaries]
        _line(latency, load, [s and s.median for s in spreads], "o-", f"{name}, median")
        _line(latency, load, [s and s.p99 for s in spreads], "o--", f"{name}, p99")
    _line(trade, users, output, "o-", "output")
    for row, x, y in zip(summaries, users, output, strict=True):
        if x is not None and y is not None:
            trade.annotate(level_name(row.level), (x, y), textcoords="offset points", xytext=(5, 5))
    throughput.set(xlabel="requests in flight, mean", ylabel="tokens/s")
    latency.set(xlabel="requests in flight, mean", ylabel="ms")
    trade.set(xlabel="tokens/s per user", ylabel="output tokens/s")
    if latency.lines:
        latency.set_yscale("log")
    for axes in (throughput, latency, trade):
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize="small")
    figure.savefig(picture, dpi=120)


def _line(
    axes: Any, xs: Sequence[float | None], ys: Sequence[float | None], style: str, label: str
) -> None:
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    if known:
        axes.plot(*zip(*known, strict=True), style, label=label, linewidth=1.2, markersize=4)
