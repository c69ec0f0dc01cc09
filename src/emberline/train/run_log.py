"""The lines of a run: `metrics.jsonl`, and TensorBoard's events where they are asked for.

Only the process that leads writes. Needs the extra `tensorboard` for the events.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EVENTS = "tensorboard"
Report = Callable[[dict[str, Any]], None]


class RunLog:
    """Appends lines.

    Args:
        folder: of the run.
        step: lines after it belong to a run that was interrupted, and are dropped.
        tensorboard: write events into `folder / "tensorboard"` too.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self.path = folder / METRICS
        kept = [line for line in read_lines(self.path) if line["step"] <= step] if step else []
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        partial.replace(self.path)
        self.seconds = max((line.get("seconds", 0.0) for line in kept), default=0.0)
        """What the kept lines say the run has taken: a resumed one counts on from there."""
        self.events: Any = _event_writer(folder / EVENTS, step) if tensorboard else None

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; it names its `split` and `step`."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.events is not None:
            for name, value in _scalars(line):
                self.events.add_scalar(f"{line['split']}/{name}", value, line["step"])
            self.events.flush()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; [] without one.

    A last line that a killed process left unfinished is no line.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_tensorboard() -> None:
    """Raises ValueError where the extra is not installed."""
    if find_spec("tensorboard") is None:
        raise ValueError('--tensorboard needs tensorboard: pip install "emberline[tensorboard]"')


def _event_writer(folder: Path, step: int) -> Any:
    check_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


def _scalars(line: dict[str, Any]) -> list[tuple[str, float]]:
    """A line's numbers; lists by position, counted from 1."""
    found: list[tuple[str, float]] = []
    for name, value in line.items():
        if isinstance(value, list):
            found += [(f"{name}/{slot}", number) for slot, number in enumerate(value, start=1)]
        elif isinstance(value, int | float) and name != "step":
            found.append((name, value))
    return found
