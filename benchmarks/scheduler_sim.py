"""Policies of verification compared at loads and on hardware that are not here, by replay.

python benchmarks/scheduler_sim.py [--shape gpu | --shape cpu | --costs FILE] [--traces FILE ...]

`replay.py` is the loop and says what a replay can know. The policies are the engine's planners. The
costs are a table of `emberline profile` or of another engine, this machine's own, or computed from
the parameters of a model and a processor (`roofline.py`), each of which is an option.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import replay
from emberline.config import EngineConfig, SpeculationConfig
from emberline.engine.trace import read_traces
from emberline.hub import resolve_draft, resolve_model
from emberline.llm import load_engine
from emberline.machine_costs import costs_for
from emberline.verify.calibration import Calibration
from emberline.verify.cost_files import load_costs
from emberline.verify.planner import CausalGreedy, LaggedTopK, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts
from roofline import Roofline

import record

HERE = Path(__file__).parent
TRACES = HERE / "traces" / "own-prompts.jsonl"
IMAGES = HERE.parent / "docs" / "images"
MOST_USERS = 512
LEAST_STEPS = 100  # a load, for means
WARM_UP = 40  # steps, at least, until planners have seen what they go by
COLOURS = 48  # of the picture
CLOSE = 0.99  # of the best policy's throughput: as good as the best

NONE, ORACLE = "no draft", "oracle"
POLICIES: dict[str, Callable[[StepCosts], replay.Policy]] = {
    NONE: lambda costs: replay.no_draft,  # noqa: ARG005
    "verify_all": lambda costs: replay.planned(VerifyAll()),  # noqa: ARG005
    "threshold 0.3": lambda costs: replay.planned(Threshold(0.3)),  # noqa: ARG005
    "threshold 0.5": lambda costs: replay.planned(Threshold(0.5)),  # noqa: ARG005
    "threshold 0.7": lambda costs: replay.planned(Threshold(0.7)),  # noqa: ARG005
    "causal_greedy": lambda costs: replay.planned(CausalGreedy(costs)),
    "lagged_top_k": lambda costs: replay.planned(LaggedTopK(costs)),
}
Curves = dict[str, list[replay.Point]]  # by policy, a point a load


def read(paths: Sequence[Path], calibration: str | None) -> tuple[replay.Tape, int]:
    """All traces on one tape, and K."""
    files = [read_traces(path) for path in paths]
    header = files[0][0]
    for path, (other, _) in zip(paths, files, strict=True):
        for name in ("num_draft_tokens", "starts"):
            if other.get(name) != header.get(name):
                raise SystemExit(f"{path}: {name} is not that of {paths[0]}: replay them apart")
    width = header["num_draft_tokens"]
    traces = [trace for _, found in files for trace in found if trace.blocks]
    confidence = replay.calibrated(traces, width, _temperatures(calibration, width))
    every_token = header.get("starts") == replay.EVERY_TOKEN
    return replay.Tape.of(traces, confidence, every_token=every_token), width


def _temperatures(calibration: str | None, width: int) -> tuple[float, ...] | None:
    if calibration is None:
        return None
    if calibration == "none":
        return (1.0,) * width
    return Calibration.load(Path(calibration)).temperatures


def machine_costs() -> StepCosts:
    """What steps of the default model cost here: kept from an earlier start, or measured now."""
    config = EngineConfig(speculation=SpeculationConfig(planner="verify_all"))
    model = resolve_model(None)
    return costs_for(load_engine(config=config).engine, model.path, resolve_draft(None, model))


def loads_up_to(most: int) -> list[int]:
    """Powers of two, and the most."""
    return sorted({*(2**i for i in range(most.bit_length())), most})


def simulate(
    tape: replay.Tape, costs: StepCosts, loads: Sequence[int], user_steps: int, seed: int
) -> Curves:
    """Every policy and then the oracle at every load, users x steps being the same for all."""
    curves: Curves = {name: [] for name in (*POLICIES, ORACLE)}
    # Users begin at all places of all answers alike; by and by they are where answers take long.
    warm_up = max(WARM_UP, len(tape.end) // len(tape.starts))
    with Progress() as progress:
        task = progress.add_task("replaying", total=len(loads) * len(curves))
        for num_users in loads:
            for name, make in (*POLICIES.items(), (ORACLE, None)):
                run = {
                    "num_users": num_users,
                    "num_steps": max(LEAST_STEPS, user_steps // num_users),
                    "num_warm_up": warm_up,
                    "seed": seed,
                }
                if make is not None:
                    point = replay.replay(tape, costs, make(costs), **run)
                else:
                    rate = max(row[-1].tokens_per_second for row in curves.values() if row)
                    point = replay.oracle_replay(tape, costs, rate, **run)
                curves[name].append(point)
                progress.advance(task)
    return curves


# What comes of it


def ratios(curves: Curves, name: str) -> list[float]:
    """Throughput over that of plain decoding, by load."""
    pairs = zip(curves[name], curves[NONE], strict=True)
    return [point.tokens_per_second / plain.tokens_per_second for point, plain in pairs]


def stops_paying(curves: Curves, name: str) -> int | None:
    """The first load at which a policy is no better than plain decoding."""
    pairs = zip(curves[name], ratios(curves, name), strict=True)
    return next((point.num_users for point, ratio in pairs if ratio <= 1), None)


def falls_behind(curves: Curves, name: str) -> int | None:
    """The first load at which a policy is not among the best, the oracle aside."""
    best = map(max, zip(*(ratios(curves, rival) for rival in POLICIES), strict=True))
    rows = zip(curves[name], ratios(curves, name), best, strict=True)
    return next((point.num_users for point, ratio, top in rows if ratio < CLOSE * top), None)


def figures(curves: Curves) -> dict[str, object]:
    """All points by policy, in columns."""
    names = [field.name for field in fields(replay.Point)]
    return {
        name: {
            "stops_paying": stops_paying(curves, name) if name != NONE else None,
            "falls_behind": falls_behind(curves, name),
            **{key: [float(f"{getattr(point, key):.5g}") for point in row] for key in names},
        }
        for name, row in curves.items()
    }


def table(curves: Curves) -> Table:
    """Throughput by policy and load, as multiples of plain decoding."""
    loads = [str(point.num_users) for point in curves[NONE]]
    shown = Table("users", *loads, "stops paying", "falls behind", box=None)
    plain = [f"{point.tokens_per_second:,.0f}" for point in curves[NONE]]
    shown.add_row(f"{NONE}, tokens/s", *plain)
    for name in curves:
        if name != NONE:
            where = (stops_paying(curves, name), falls_behind(curves, name))
            cells = [f"{ratio:.3f}" for ratio in ratios(curves, name)]
            shown.add_row(name, *cells, *("" if load is None else str(load) for load in where))
    return shown


def draw(curves: Curves, title: str, picture: Path) -> None:
    """Throughput against speed per user, and by load: gain, verify and acceptance length."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    (trade, gain), (verify, accept) = figure.subplots(2, 2)
    for name, row in curves.items():
        style = {NONE: "k-", ORACLE: "k:"}.get(name, "o-")
        style = {"causal_greedy": "s-", "lagged_top_k": "^--"}.get(name, style)

        def line(axes: Any, xs: Any, ys: Any, style: str = style, name: str = name) -> None:
            axes.plot(xs, ys, style, label=name, linewidth=1.2, markersize=4)

        loads = [point.num_users for point in row]
        speeds = [point.tokens_per_second_per_user for point in row]
        line(trade, speeds, [point.tokens_per_second for point in row])
        line(gain, loads, ratios(curves, name))
        line(verify, loads, [point.verify_length for point in row])
        line(accept, loads, [point.acceptance_length for point in row])
    trade.set(xlabel="tokens/s per user", ylabel="tokens/s, all users", yscale="log")
    gain.set(ylabel="throughput over no draft")
    verify.set(xlabel="users", ylabel="drafts verified a step")
    accept.set(xlabel="users", ylabel="tokens emitted a step")
    for axes in (gain, verify, accept):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    for axes in (trade, gain, verify, accept):
        axes.grid(alpha=0.3)
    trade.legend(fontsize="small")
    figure.savefig(drawn := BytesIO(), dpi=90)
    # Lines in a few colours: a palette makes the file a third.
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Replay, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, nargs="+", default=[TRACES])
    parser.add_argument("--calibration", help='file, or "none"; default: fitted to other prompts')
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--costs", type=Path, help="table of step costs, of any known format")
    source.add_argument("--shape", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--users", type=int, nargs="+", help="default: powers of two")
    parser.add_argument("--user-steps", type=int, default=8_192, help="users x steps, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of what is written; default: that of the costs")
    parser.add_argument("--plot", type=Path, help="default: docs/images/scheduler-sim-<name>.png")
    shape = parser.add_argument_group("gpu", "parameters of the computed costs")
    for field in fields(Roofline):
        option = f"--{field.name.replace('_', '-')}"
        shape.add_argument(option, type=type(field.default), default=field.default)
    args = parser.parse_args()
    tape, width = read(args.traces, args.calibration)
    title: str
    what: object
    if args.costs is None and args.shape == "gpu":
        roofline = Roofline(**{field.name: getattr(args, field.name) for field in fields(Roofline)})
        loads = args.users or loads_up_to(MOST_USERS)
        name, costs, what = "gpu", roofline.costs(loads, width), asdict(roofline)
        title = f"computed costs: {roofline.summary}"
    else:
        name = "cpu" if args.costs is None else args.costs.stem
        costs = machine_costs() if args.costs is None else load_costs(args.costs)
        what = {"target": costs.target, "draft": costs.draft}
        title = f"costs of {name}"
        # Costs of other engines may be of tokens alone, whatever the requests.
        most = max(num_reqs for num_reqs, _, _ in costs.target)
        loads = args.users or loads_up_to(most if most > 1 else MOST_USERS)
    name = args.name or name
    curves = simulate(tape, costs, loads, args.user_steps, args.seed)
    Console(width=140).print(table(curves))
    where = args.plot or IMAGES / f"scheduler-sim-{name}.png"
    draw(curves, title, where)
    result = record.write(
        f"scheduler-sim-{name}",
        {
            "traces": [path.name for path in args.traces],
            "blocks": len(tape.end),
            "costs": what,
            "policies": figures(curves),
        },
    )
    print("written:", result, "and", where)


if __name__ == "__main__":
    main()
