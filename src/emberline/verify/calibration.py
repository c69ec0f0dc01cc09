"""Sequential temperature scaling (STS): turning a draft's confidences into true chances.

Owns the fit, the figures that judge it, and the file that a calibration is kept in. Must not know
drafters, engines or where samples come from: it sees confidence logits and what survived.

A confidence is the chance that draft k survives, given that all before it do; its logit is divided
by t_k. What a planner reads is the product up to k, the *survival*, and that is what is judged: t_0
is fitted to the survival of draft 0, then t_1 to that of draft 1 with t_0 in place, and so on.
Calibration never changes what is emitted, only how much is verified.

N blocks, K drafts a block. A logit that is NaN marks a draft that was not verified: nothing is
known of it, and it counts nowhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberline.models.weights import ModelError, read_json

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CALIBRATION_FILE = "calibration.json"
NUM_BINS = 15
LEAST = 1e-12
GRID = np.logspace(-1.0, 1.0, 41)
"""Temperatures that are tried."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures of a draft's confidences, and how good they were found to be.

    The figures are of survival, by position, on blocks that the fit has not seen. They inform
    whoever reads the file; NaN (null in the file) says that there is no such figure.
    """

    temperatures: tuple[float, ...]  # [K]
    dataset: str = ""
    num_samples: int = 0  # blocks that the temperatures were fitted to
    ece_before: tuple[float, ...] = ()  # [K] or none
    ece_after: tuple[float, ...] = ()  # [K] or none
    auc: tuple[float, ...] = ()  # [K] or none, after

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("temperatures is empty: give one a draft of a block")
        for position, value in enumerate(self.temperatures):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"temperatures[{position}] must be finite and over 0 (1 changes nothing), "
                    f"got {value}"
                )
        if self.num_samples < 0:
            raise ValueError(f"num_samples must not be negative, got {self.num_samples}")
        for name in ("ece_before", "ece_after", "auc"):
            count = len(getattr(self, name))
            if count not in (0, len(self.temperatures)):
                raise ValueError(
                    f"{name} has {count} entries for {len(self.temperatures)} temperatures: "
                    f"give one a temperature, or leave it out"
                )

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file of ours, of SGLang's or of TensorRT-LLM's (`sts_temperatures`).

        Fields that other engines add are theirs: they are not read.

        Raises:
            ModelError: the file is not such a file; the message names file, field and remedy.
        """
        raw = read_json(path)
        try:
            return cls(
                temperatures=_temperatures(raw),
                dataset=_text(raw, "dataset"),
                num_samples=_count(raw, "num_samples"),
                ece_before=_numbers(raw, "ece_before"),
                ece_after=_numbers(raw, "ece_after"),
                auc=_numbers(raw, "auc"),
            )
        except (ValueError, OverflowError) as problem:
            raise ModelError(f"{path}: {problem}") from problem

    def save(self, path: Path) -> None:
        """Write the file that those engines and this one read."""

        def rounded(values: tuple[float, ...]) -> list[float | None]:
            return [round(value, 4) if math.isfinite(value) else None for value in values]

        fields = {
            "temperatures": [float(f"{value:.6g}") for value in self.temperatures],
            "dataset": self.dataset,
            "num_samples": self.num_samples,
            "ece_before": rounded(self.ece_before),
            "ece_after": rounded(self.ece_after),
            "auc": rounded(self.auc),
        }
        # One field a line: a list of seven numbers on seven lines is hard to read.
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def calibration_path(draft: Path) -> Path:
    """Where a draft's calibration lies: in its folder, or beside its file."""
    if draft.is_file():
        return draft.with_name(f"{draft.stem}.{CALIBRATION_FILE}")
    return draft / CALIBRATION_FILE


def draft_calibration(draft: Path, override: Path | None = None) -> Calibration | None:
    """The calibration to use with a draft: the given file, or its own, or none.

    Raises:
        ModelError: the file is missing though it was named, or is no calibration.
    """
    path = override or calibration_path(draft)
    if override is None and not path.is_file():
        return None
    return Calibration.load(path)


# The fit


@dataclass(frozen=True, slots=True)
class Samples:
    """Blocks that were verified: what the draft's head said, and what became of them."""

    logits: Floats  # [N, K] of the confidences, uncalibrated; NaN: not verified
    survived: Bools  # [N, K], whether the draft and all before it were accepted


def calibrate(fitted: Samples, judged: Samples, dataset: str = "") -> Calibration:
    """Temperatures fitted to one part of the samples, with their figures on the other.

    Raises:
        ValueError: a position has no sample to fit to.
    """
    temperatures = fit(fitted)
    before = survival(judged.logits, (1.0,) * len(temperatures))
    after = survival(judged.logits, temperatures)
    return Calibration(
        temperatures,
        dataset,
        num_samples=len(fitted.survived),
        ece_before=by_position(ece, before, judged.survived),
        ece_after=by_position(ece, after, judged.survived),
        auc=by_position(auc, after, judged.survived),
    )


def fit(samples: Samples, grid: Floats = GRID) -> tuple[float, ...]:
    """Temperatures [K] that minimise the log loss of survival, position by position.

    Among equally good ones, the one nearest to 1. The log loss, and not the calibration error
    itself: of some thousand blocks that one is so noisy a measure that its minimum is worse than no
    calibration on blocks it has not seen (docs/lab-notes.md).

    Args:
        samples: N blocks.
        grid: temperatures to try.

    Raises:
        ValueError: a position has no sample.
    """
    empty = np.flatnonzero(np.isnan(samples.logits).all(axis=0))
    if len(empty):
        raise ValueError(f"draft {empty[0] + 1} of a block was never verified: more samples needed")
    mildest_first = sorted((float(t) for t in grid), key=lambda t: abs(math.log(t)))
    before = np.ones(len(samples.logits))
    temperatures = []
    for logits, outcome in zip(samples.logits.T, samples.survived.T, strict=True):
        chances = [before * sigmoid(logits / t) for t in mildest_first]
        best = int(np.argmin([log_loss(chance, outcome) for chance in chances]))
        temperatures.append(mildest_first[best])
        before = chances[best]
    return tuple(temperatures)


def survival(logits: Floats, temperatures: tuple[float, ...]) -> Floats:
    """Chance that draft k and all before it are accepted. [N, K] -> [N, K]."""
    return np.cumprod(sigmoid(logits / np.array(temperatures)), axis=1, dtype=np.float64)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), written so that nothing overflows."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)


# The figures


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predicted against observed, in equal-width bins of the prediction. J bins."""

    confidence: Floats  # [J] mean prediction; NaN where a bin is empty
    frequency: Floats  # [J] share that came true; NaN where a bin is empty
    count: NDArray[np.int64]  # [J]


def reliability(predicted: Floats, outcome: Bools, num_bins: int = NUM_BINS) -> Reliability:
    """Bin N predictions in [0, 1] against their outcomes. NaN predictions are left out."""
    known = ~np.isnan(predicted)
    predicted, outcome = predicted[known], outcome[known]
    index = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    count = np.bincount(index, minlength=num_bins)
    sums = [np.bincount(index, values, num_bins) for values in (predicted, outcome)]
    confidence, frequency = (np.divide(s, count, np.full(num_bins, np.nan), where=count > 0)
                             for s in sums)  # fmt: skip
    return Reliability(confidence, frequency, count)


def ece(predicted: Floats, outcome: Bools, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error: mean |prediction - frequency| over bins, weighted by count.

    Guo et al. 2017, section 2. NaN without samples.
    """
    bins = reliability(predicted, outcome, num_bins)
    filled = bins.count > 0
    if not filled.any():
        return math.nan
    gap = np.abs(bins.confidence[filled] - bins.frequency[filled])
    return float(np.average(gap, weights=bins.count[filled]))


def log_loss(predicted: Floats, outcome: Bools) -> float:
    """Mean of -log(chance given to what happened), in nats. NaN predictions are left out.

    A chance of exactly 0 or 1 that was wrong costs as much as one of `LEAST`.
    """
    known = ~np.isnan(predicted)
    right = np.where(outcome[known], predicted[known], 1.0 - predicted[known])
    return float(-np.log(np.maximum(right, LEAST)).mean())


def auc(predicted: Floats, outcome: Bools) -> float:
    """Area under the ROC curve: the chance that a survivor is ranked over a casualty.

    Ties count half (Mann-Whitney U). NaN when there are only survivors or only casualties.
    """
    known = ~np.isnan(predicted)
    predicted, outcome = predicted[known], outcome[known]
    num_true = int(outcome.sum())
    num_false = len(outcome) - num_true
    if not (num_true and num_false):
        return math.nan
    _, group, size = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = np.cumsum(size) - (size - 1) / 2  # mean rank of each group of equals, from 1
    above = rank[group][outcome].sum() - num_true * (num_true + 1) / 2
    return float(above / (num_true * num_false))


def by_position(
    figure: Callable[[Floats, Bools], float], predicted: Floats, outcome: Bools
) -> tuple[float, ...]:
    """A figure of each column. [N, K], [N, K] -> [K]."""
    columns = zip(predicted.T, outcome.T, strict=True)
    return tuple(figure(column, seen) for column, seen in columns)


# The file's fields


def _temperatures(raw: dict[str, Any]) -> tuple[float, ...]:
    found = {name: _numbers(raw, name) for name in ("temperatures", "sts_temperatures")}
    given = [values for values in found.values() if values]
    if not given:
        raise ValueError("temperatures is missing: give one a draft of a block")
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError("temperatures and sts_temperatures differ: keep one of them")
    return given[0]


def _numbers(raw: dict[str, Any], name: str) -> tuple[float, ...]:
    values = raw.get(name)
    if values is None:
        return ()
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list of numbers, got {values!r}")
    numbers = [math.nan if value is None else value for value in values]
    for position, value in enumerate(numbers):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}[{position}] must be a number, got {value!r}")
    return tuple(float(value) for value in numbers)


def _text(raw: dict[str, Any], name: str) -> str:
    value = raw.get(name)
    if not isinstance(value, str | None):
        raise ValueError(f"{name} must be text, got {value!r}")
    return value or ""


def _count(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value or 0
