"""Output tokens a second of each verification policy under load, in one interleaved run.

python benchmarks/serving.py [--concurrency 1 2 4 8 16] [--rounds 3] [--prompts FOLDER]
    [--dtype bfloat16] [--threads N]

One server a policy, `emberline bench serve`'s closed loop on them in turn, concurrency by
concurrency and round by round: a machine that slows down slows all of them. A server that is not
asked sleeps. What counts is the time in which every user has a request.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from emberline.bench.client import RequestRecord
from emberline.bench.metrics import LevelSummary, summarize
from emberline.bench.prompts import Prompt, PromptSet, fixed_prompts
from emberline.bench.session import Plan, measure
from emberline.bench.settings import ClosedLoop, LoadSettings, RequestSettings, ServerSettings

import prompts as prompt_sets
import record
from server_footprint import wait_for_answer

SCHEDULED = "scheduled"
POLICIES: dict[str, list[str]] = {
    "no draft": ["--draft", "none"],
    "verify_all": ["--planner", "verify_all"],
    "threshold 0.5": ["--planner", "threshold", "--threshold", "0.5"],
    SCHEDULED: [],
    "lagged_top_k": ["--planner", "lagged_top_k"],
}


@dataclass(frozen=True)
class Arm:
    """A policy and the server that runs it."""

    name: str
    url: str


class Silent:
    """Nobody watches a single level."""

    def level_begins(self, level: Any, load: Any) -> None:
        """Nothing to say."""

    def request_ends(self, request: Any) -> None:
        """Nothing to say."""


@dataclass(frozen=True)
class Measured:
    """One closed loop."""

    summary: LevelSummary
    tokens: float  # that came while every user had a request
    seconds: float  # of that


def start(stack: ExitStack, name: str, port: int, options: Sequence[str]) -> Arm:
    """A server of its own for a policy; ended with the stack."""
    program = Path(sys.executable).with_name("emberline")
    command = [str(program), "serve", "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen([*command, *POLICIES[name], *options])
    stack.callback(server.wait, 60)
    stack.callback(server.terminate)
    url = f"http://127.0.0.1:{port}"
    wait_for_answer(url)
    return Arm(name, url)


def run_level(arm: Arm, concurrency: int, prompts: PromptSet, args: argparse.Namespace) -> Measured:
    """One closed loop on one server."""
    plan = Plan(
        server=ServerSettings(base_url=arm.url),
        request=RequestSettings(max_tokens=args.tokens, temperature=args.temperature),
        load=LoadSettings(
            levels=(ClosedLoop(concurrency),),
            num_requests=max(args.least, args.turns * concurrency),
        ),
        prompts=prompts,
    )
    session = asyncio.run(measure(plan, Silent()))
    summary = summarize(session.runs[0])
    if summary.failed:
        raise SystemExit(f"{arm.name}: requests failed: {summary.failures}")
    return Measured(summary, *while_all_ask(session.runs[0].records))


def length(index: int, tokens: int) -> int:
    """Most tokens of a prompt's answer: half as many as the average to half as many again.

    Were all alike, answers without drafts would stay in step, their prompts in one batch.
    """
    return tokens // 2 + index * 37 % (tokens + 1)


def while_all_ask(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """Tokens and seconds until the first user has nothing more to ask.

    Behind that fewer and fewer requests are in flight. Answers of one length that go on in step
    have no such end, and others would be charged for being out of step.
    """
    last = max(one.start for one in records)
    until = min(one.end for one in records if one.end > last)
    tokens = 0.0
    for one in records:
        share = bisect_right(one.chunk_times, until) / max(1, len(one.chunk_times))
        tokens += share * (one.completion_tokens or 0)
    return tokens, until - min(one.start for one in records)


def combine(rounds: Sequence[Measured]) -> dict[str, float]:
    """One arm at one concurrency over all rounds."""
    tokens, seconds = sum(one.tokens for one in rounds), sum(one.seconds for one in rounds)
    speeds = [one.tokens / one.seconds for one in rounds]
    summaries = [one.summary for one in rounds]
    whole = sum(s.completion_tokens or 0 for s in summaries)
    lengths = [s.acceptance_length for s in summaries if s.acceptance_length is not None]
    return {
        "output_tokens_per_second": tokens / seconds,
        "with_the_ends": whole / sum(s.duration_seconds for s in summaries),
        "completion_tokens": whole,
        "seconds": seconds,
        "ttft_ms": statistics.median(s.ttft_ms.median for s in summaries if s.ttft_ms),
        "tpot_ms": statistics.median(s.tpot_ms.median for s in summaries if s.tpot_ms),
        "acceptance_length": statistics.mean(lengths) if lengths else 1.0,
        "slowest_round": min(speeds),
        "fastest_round": max(speeds),
    }


def ratios(levels: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The scheduled policy over the best of the others, and over verify_all, by concurrency."""
    found = {}
    for level, rows in levels.items():
        speed = {name: row["output_tokens_per_second"] for name, row in rows.items()}
        fixed = [name for name in speed if name not in (SCHEDULED, "lagged_top_k")]
        found[level] = {
            "over_best": speed[SCHEDULED] / max(speed[name] for name in fixed),
            "over_verify_all": speed[SCHEDULED] / speed["verify_all"],
        }
    return found


def plot(levels: dict[str, dict[str, dict[str, float]]], picture: Path) -> None:
    """Throughput against concurrency, and against the speed that each user sees."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    counts = [int(level) for level in levels]
    for name in next(iter(levels.values())):
        speeds = [rows[name]["output_tokens_per_second"] for rows in levels.values()]
        left.plot(counts, speeds, marker="o", label=name)
        users = [speed / count for speed, count in zip(speeds, counts, strict=True)]
        right.plot(users, speeds, marker="o", label=name)
    left.set(xlabel="requests in flight", ylabel="output tokens / s", xscale="log")
    left.set_xticks(counts, [str(count) for count in counts])
    left.minorticks_off()
    right.set(xlabel="tokens / s of each user", ylabel="output tokens / s")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(picture, dpi=80)


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="requests of each user a round")
    parser.add_argument("--least", type=int, default=4, help="requests of a round at least")
    parser.add_argument(
        "--tokens", type=int, default=128, help="most tokens of an answer, on average"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, help="folder of prompt sets; default: own prompts")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, help="of each server; default: all cores but one")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--port", type=int, default=8130, help="of the first server")
    parser.add_argument("--out", default="serving", help="name of the results file")
    parser.add_argument("--plot", type=Path, help="picture of the figures")
    args = parser.parse_args()
    options = ["--dtype", args.dtype]
    if args.threads:
        options += ["--threads", str(args.threads)]
    groups = prompt_sets.load(args.prompts, 20 if args.prompts else 6).values()
    texts = [text for row in itertools.zip_longest(*groups) for text in row if text]
    asked = [Prompt(text, max_tokens=length(i, args.tokens)) for i, text in enumerate(texts)]
    prompts = fixed_prompts("given" if args.prompts else "own", asked)
    measured: dict[tuple[int, str], list[Measured]] = {}
    with ExitStack() as stack:
        arms = [
            start(stack, name, args.port + index, options)
            for index, name in enumerate(args.policies)
        ]
        info = {arm.name: httpx.get(f"{arm.url}/server_info").json() for arm in arms}
        for arm in arms:
            run_level(arm, 2, prompts, args)  # warm-up
        runs = [
            (count, arm) for count in args.concurrency for _ in range(args.rounds) for arm in arms
        ]
        with Progress(console=Console(stderr=True)) as bar:
            for count, arm in bar.track(runs, description="levels"):
                one = run_level(arm, count, prompts, args)
                speed = one.tokens / one.seconds
                bar.console.print(f"{count:3} in flight, {arm.name}: {speed:.1f} tokens/s")
                measured.setdefault((count, arm.name), []).append(one)
    levels = {
        str(count): {name: combine(measured[count, name]) for name in args.policies}
        for count in args.concurrency
    }
    compared = ratios(levels)
    table = Table("in flight", *args.policies, "over best", "over verify_all")
    for level, rows in levels.items():
        table.add_row(
            level,
            *(
                f"{row['output_tokens_per_second']:.1f} ({row['acceptance_length']:.2f})"
                for row in rows.values()
            ),
            f"{compared[level]['over_best']:.3f}",
            f"{compared[level]['over_verify_all']:.3f}",
        )
    console = Console(width=130)
    console.print(table)
    console.print("output tokens a second (tokens a verify step)")
    figures: dict[str, object] = {
        "unit": "output tokens per second",
        "info": info,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "levels": levels,
        "scheduled": compared,
    }
    print("written:", record.write(args.out, figures))
    if args.plot:
        plot(levels, args.plot)


if __name__ == "__main__":
    main()
