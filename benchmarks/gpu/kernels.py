"""Every GPU op at the sizes of a step, beside its plain form and its floor.

    PYTHONPATH=benchmarks .venv/bin/python -m gpu.kernels --ops attention

A floor is the least bytes over the copy bandwidth measured in the same run (or operations over
the measured rate). Ops of a family stand in a file of their own, named in `SUITES`; its `cases`
yields them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch

from gpu import linear_ops, model_ops, sampling_ops
from gpu.timing import Case, Timing, copy_bandwidth, launch_seconds, measure, multiply_rate
from record import write

SUITES: dict[str, Callable[[torch.dtype, str], Iterable[Case]]] = {
    "linear": linear_ops.cases,
    "model": model_ops.cases,
    "sampling": sampling_ops.cases,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main() -> None:
    """Measure, print the table and write `results/<name>.json`."""
    settings = _arguments()
    if not torch.cuda.is_available():
        sys.exit("gpu.kernels needs a CUDA GPU: none is visible")
    repeats = settings.repeats
    bandwidth, rate = copy_bandwidth(repeats), multiply_rate(repeats)
    launch = launch_seconds(repeats) * 1e6
    print(f"{torch.cuda.get_device_name()}: copies at {bandwidth / 1e12:.2f} TB/s,", end=" ")
    print(f"multiplies at {rate / 1e12:.0f} TFLOP/s, least kernel {launch:.2f} us in a graph\n")
    print(f"{'op':28} {'size':36} {'us':>8} {'plain':>8} {'floor':>8} {'of floor':>8}")
    timings = []
    for suite in settings.suites:
        for case in SUITES[suite](DTYPES[settings.dtype], settings.ops):
            timings.append(measure(case, bandwidth, rate, repeats))
            print(_line(timings[-1]), flush=True)
            del case  # its tensors, before the next one's are made
            torch.cuda.empty_cache()
    if not timings:
        sys.exit(f"--ops: no op of {', '.join(settings.suites)} has {settings.ops!r} in its name")
    figures = {
        "gpu": torch.cuda.get_device_name(),
        "dtype": settings.dtype,
        "copy_bandwidth": bandwidth,
        "multiply_rate": rate,
        "launch_us": launch,
        "ops": [asdict(timing) for timing in timings],
    }
    print(f"\n{write(settings.name, figures)}")


def _line(timing: Timing) -> str:
    plain = "-" if timing.plain_us is None else f"{timing.plain_us:.1f}"
    ratio = timing.us / timing.floor_us if timing.floor_us else float("inf")
    return (
        f"{timing.op:28} {timing.size:36} {timing.us:8.2f} {plain:>8} {timing.floor_us:8.2f} "
        f"{ratio:7.1f}x"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--suites", nargs="+", choices=sorted(SUITES), default=sorted(SUITES))
    parser.add_argument("--ops", default="", help="only ops with this in their name")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="of each, the median counts")
    parser.add_argument("--name", default="gpu-kernels", help="of the file of results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
