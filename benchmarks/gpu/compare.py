"""This engine and others on one machine in one run: decode cells paired, and their ratios.

    PYTHONPATH=benchmarks python -m gpu.compare --ours "python -m gpu.decode ..." \\
        --peer "sglang=bash kit/sglang.sh" --peer "sglang=bash kit/sglang.sh --draft D" --peer ...

Every engine is a child process of its own, one after the other, ours between the others: hosts
differ by more than engines do, and a machine that slows down slows both sides. A child prints a
JSON object a line; the lines that count have `concurrency`, `logprobs` (0: none), `draft` ("none",
or how drafts were verified) and `tok_s`. A child that fails or takes too long is said, and what it
printed before counts. A cell is the median of its runs. The ratio is ours over the best peer's.
With `--runs FILE` the runs of earlier calls on the same machine count as well.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import record

OURS = "emberline"
NO_DRAFT = "none"
ERROR_LINES = 15  # of a child that failed, for the reader


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """What two engines must share to be compared."""

    concurrency: int
    logprobs: int
    draft: str

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.draft != NO_DRAFT


@dataclass(slots=True)
class Run:
    """What one child printed, and how it ended."""

    name: str
    command: str
    seconds: float = 0.0
    first_line_seconds: float | None = None  # from its start to its first line of JSON
    problem: str | None = None
    lines: list[dict[str, object]] = field(default_factory=list)

    def cells(self) -> Iterator[tuple[Place, float]]:
        """Its measurements."""
        for line in self.lines:
            if {"concurrency", "logprobs", "draft", "tok_s"} <= line.keys():
                place = Place(
                    int(str(line["concurrency"])), int(str(line["logprobs"])), str(line["draft"])
                )
                yield place, float(str(line["tok_s"]))


def run(name: str, command: str, limit: float) -> Run:
    """Run a child to its end, or to the limit in seconds, and keep what it said."""
    result, other = Run(name, command), []
    began = time.perf_counter()
    with subprocess.Popen(
        # `timeout` ends what the child has started as well: engines have workers.
        ["timeout", "-k", "5", str(limit), *shlex.split(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        for text in child.stdout or ():
            line = _parse(text)
            if line is None:
                other.append(text.rstrip()[:300])
                continue
            if result.first_line_seconds is None:
                result.first_line_seconds = round(time.perf_counter() - began, 2)
            result.lines.append(line)
        code = child.wait()
    result.seconds = round(time.perf_counter() - began, 1)
    if code == 124:
        result.problem = f"took longer than {limit:.0f} s"
    elif code:
        result.problem = f"ended with {code}"
    elif not any(result.cells()):
        result.problem = "printed no cell"
    found = len(list(result.cells()))
    print(f"{name}: {found} cells in {result.seconds} s", result.problem or "", flush=True)
    if result.problem:
        print(*(f"    {text}" for text in other[-ERROR_LINES:]), sep="\n", flush=True)
    return result


def _parse(text: str) -> dict[str, object] | None:
    """A line's JSON object, if it is one."""
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def order(peers: Sequence[tuple[str, str]], ours: str, between: int) -> list[tuple[str, str]]:
    """Ours first, last, and after every `between` peers."""
    runs = [(OURS, ours)]
    for index in range(0, len(peers), between):
        runs += [*peers[index : index + between], (OURS, ours)]
    return runs


def medians(runs: Iterable[Run]) -> dict[str, dict[Place, float]]:
    """Tokens a second by engine and place."""
    found: dict[str, dict[Place, list[float]]] = {}
    for one in runs:
        for place, rate in one.cells():
            found.setdefault(one.name, {}).setdefault(place, []).append(rate)
    return {
        name: {place: statistics.median(rates) for place, rates in places.items()}
        for name, places in found.items()
    }


def pairs(engines: dict[str, dict[Place, float]]) -> list[dict[str, object]]:
    """Each of our cells beside the best peer's: with the same drafting, and in its best mode."""
    rows: list[dict[str, object]] = []
    for place, rate in sorted(engines.get(OURS, {}).items()):
        rivals = [
            (theirs, name, where)
            for name, places in engines.items()
            if name != OURS
            for where, theirs in places.items()
            if (where.concurrency, where.logprobs) == (place.concurrency, place.logprobs)
        ]
        row: dict[str, object] = {
            "concurrency": place.concurrency,
            "logprobs": place.logprobs,
            "draft": place.draft,
            "tok_s": rate,
        }
        alike = [rival for rival in rivals if rival[2].drafts == place.drafts]
        plain = [rival for rival in rivals if not rival[2].drafts]
        for key, group in (("alike", alike), ("plain", plain), ("any", rivals)):
            if group:
                theirs, name, where = max(group, key=lambda rival: rival[0])
                mode = "draft" if where.drafts else "plain"
                row[key] = {"engine": name, "mode": mode, "tok_s": theirs}
                row[f"over_{key}"] = round(rate / theirs, 3)
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, object]]) -> str:
    """The pairs, a line each."""
    lines = [
        f"{'requests':>8} {'logprobs':>8} {'draft':14} {'ours':>9}"
        f"  {'same drafting':>24} {'ratio':>6}  {'best mode':>24} {'ratio':>6}"
    ]
    for row in rows:
        line = (
            f"{row['concurrency']:>8} {row['logprobs']:>8} {row['draft']:14} {row['tok_s']:>9.0f}"
        )
        for key in ("alike", "any"):
            rival, ratio = row.get(key), row.get(f"over_{key}", "-")
            text = "-"
            if isinstance(rival, dict):
                text = f"{rival['engine']} {rival['mode']} {rival['tok_s']:.0f}"
            line += f"  {text:>24} {ratio:>6}"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run every engine, print the pairs, write `results/<name>.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ours", required=True, help="command that prints our cells")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="one of its modes"
    )
    parser.add_argument("--between", type=int, default=2, help="peers' runs between two of ours")
    parser.add_argument("--limit", type=float, default=170, help="seconds that a child may take")
    parser.add_argument("--runs", type=Path, help="file of runs to go on with, and to add to")
    parser.add_argument("--name", default="gpu-compare", help="of the file of results")
    args = parser.parse_args(argv)
    peers = []
    for text in args.peer:
        name, sign, command = text.partition("=")
        if not (name and sign and command) or name == OURS:
            parser.error(f"--peer must be NAME=COMMAND, NAME not {OURS}, got {text!r}")
        peers.append((name, command))
    if args.between < 1:
        parser.error(f"--between must be at least 1, got {args.between}")
    runs = earlier(args.runs)
    for name, command in order(peers, args.ours, args.between):
        runs.append(run(name, command, args.limit))
        if args.runs is not None:
            with args.runs.open("a") as file:
                file.write(json.dumps(asdict(runs[-1])) + "\n")
        rows = pairs(medians(runs))
        figures: dict[str, object] = {
            "unit": "output tokens a second, medians",
            "pairs": rows,
            "runs": [_noted(one) for one in runs],
        }
        written = record.write(args.name, figures)  # at every step: the machine may be taken away
    print(table(rows))
    print("written:", written)


def earlier(path: Path | None) -> list[Run]:
    """The runs that a file holds; none if there is no file yet."""
    if path is None or not path.exists():
        return []
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def _noted(one: Run) -> dict[str, object]:
    """A run for the file: its command without folders, its lines as they were."""
    words = [word.rsplit("/", 1)[-1] for word in shlex.split(one.command)]
    return {
        "engine": one.name,
        "command": shlex.join(words),
        "seconds": one.seconds,
        "first_line_seconds": one.first_line_seconds,
        "problem": one.problem,
        "lines": one.lines,
    }


if __name__ == "__main__":
    main()
