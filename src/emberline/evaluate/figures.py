"""From answers to figures: lengths, rates by position, calibration, and how sure they are.

Owns the formulas. Must not know engines or tables.

Acceptance length is tokens emitted a verify step, the target's own token included, the answer's
first token, which no step verified, left out. By position k of a block, counted from 0:

    conditional   accepted at k, of the blocks whose drafts before k were all accepted
    marginal      accepted at k, of the blocks that verified draft k

both of verified drafts alone. Standard errors come from resampling prompts, not steps: the steps
of one answer are alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberline.engine.trace import RequestTrace, samples
from emberline.evaluate.measure import Answer
from emberline.verify.calibration import auc, by_position, ece, survival

Floats = NDArray[np.float64]

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks by position, and the rates that follow. K positions."""

    verified: tuple[int, ...]  # [K] blocks that verified draft k
    reached: tuple[int, ...]  # [K] of those, with every earlier draft accepted
    accepted: tuple[int, ...]  # [K] of those, with draft k accepted as well

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """Accepted of reached; None where nothing was."""
        return _shares(self.accepted, self.reached)

    @property
    def marginal(self) -> tuple[float | None, ...]:
        """Accepted of verified; None where nothing was."""
        return _shares(self.accepted, self.verified)


@dataclass(frozen=True, slots=True)
class Confidence:
    """How true the survivals were that the engine planned by. NaN: no such figure."""

    ece: tuple[float, ...]  # [K] expected calibration error
    auc: tuple[float, ...]  # [K] how well survivors are told from casualties


@dataclass(frozen=True, slots=True)
class Figures:
    """One draft on some prompts at one temperature."""

    num_prompts: int
    num_steps: int
    num_emitted: int
    length: float | None  # acceptance length; None without a step
    standard_error: float | None
    counts: Counts
    confidence: Confidence | None  # None: the drafter has none


@dataclass(frozen=True, slots=True)
class Summary:
    """One draft at one temperature: every set, and all of them."""

    sets: Mapping[str, Figures]
    everything: Figures  # answers of all sets together, for rates by position
    macro: float | None  # mean of the sets' acceptance lengths
    macro_error: float | None
    macro_resampled: Floats | None  # [RESAMPLES] the macro mean of resampled prompts


def summarise(answers: Sequence[Answer], width: int, seed: int = 0) -> Summary:
    """Figures of one draft's answers at one temperature.

    Args:
        answers: at least one.
        width: K, the drafts of a block.
        seed: of the resampling. The same prompts are resampled for every draft.
    """
    by_set: dict[str, list[Answer]] = {}
    for answer in answers:
        by_set.setdefault(answer.set_name, []).append(answer)
    resampled = {name: resample(part, name, seed) for name, part in by_set.items()}
    sets = {name: figures(part, width, resampled[name]) for name, part in by_set.items()}
    lengths = [found.length for found in sets.values()]
    known = [length for length in lengths if length is not None]
    draws = np.mean(list(resampled.values()), axis=0)
    whole = len(known) == len(lengths)
    return Summary(
        sets=sets,
        everything=figures(answers, width, None),
        macro=sum(known) / len(known) if whole else None,
        macro_error=_spread(draws) if whole else None,
        macro_resampled=draws if whole else None,
    )


def figures(answers: Sequence[Answer], width: int, resampled: Floats | None) -> Figures:
    """Figures of some answers; `resampled` are their acceptance lengths on resampled prompts."""
    steps = sum(answer.num_steps for answer in answers)
    emitted = sum(answer.num_emitted for answer in answers)
    return Figures(
        num_prompts=len(answers),
        num_steps=steps,
        num_emitted=emitted,
        length=emitted / steps if steps else None,
        standard_error=_spread(resampled) if resampled is not None and steps else None,
        counts=count(answers, width),
        confidence=_confidence(answers, width),
    )


def count(answers: Sequence[Answer], width: int) -> Counts:
    """Blocks by position."""
    blocks = [block for answer in answers for block in answer.blocks]
    verified = np.array([block.num_verified for block in blocks], dtype=np.int64)
    accepted = np.array([block.num_accepted for block in blocks], dtype=np.int64)
    at = np.arange(width)[:, None]
    was_verified = verified > at

    def totals(mask: NDArray[np.bool_]) -> tuple[int, ...]:
        return tuple(int(total) for total in mask.sum(axis=1))

    return Counts(
        verified=totals(was_verified),
        reached=totals(was_verified & (accepted >= at)),
        accepted=totals(accepted > at),
    )


def resample(answers: Sequence[Answer], name: str, seed: int) -> Floats:
    """Acceptance lengths of prompts drawn with replacement (Efron 1979), [RESAMPLES].

    The draws follow from the set's name, its size and the seed: drafts measured on the same
    prompts are resampled alike, so that their ratio has a standard error as well.
    """
    steps = np.array([answer.num_steps for answer in answers], dtype=np.float64)
    emitted = np.array([answer.num_emitted for answer in answers], dtype=np.float64)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    drawn = rng.integers(len(answers), size=(RESAMPLES, len(answers)))
    lengths: Floats = emitted[drawn].sum(axis=1) / np.maximum(steps[drawn].sum(axis=1), 1.0)
    return lengths


def ratio(summary: Summary, base: Summary) -> tuple[float, float] | None:
    """Macro acceptance length over another draft's, and its standard error; None if unknown."""
    if not summary.macro or not base.macro:
        return None
    assert summary.macro_resampled is not None
    assert base.macro_resampled is not None
    draws = summary.macro_resampled / base.macro_resampled
    return summary.macro / base.macro, _spread(draws)


def _spread(draws: Floats) -> float:
    return float(draws.std(ddof=1))


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> tuple[float | None, ...]:
    pairs = zip(parts, wholes, strict=True)
    return tuple(part / whole if whole else None for part, whole in pairs)


def _confidence(answers: Sequence[Answer], width: int) -> Confidence | None:
    """The engine's confidences are calibrated already: they are judged as they are."""
    traces = [
        RequestTrace(str(answer.prompt), answer.temperature, answer.blocks) for answer in answers
    ]
    if not any(block.confidence for trace in traces for block in trace.blocks):
        return None
    found = samples(traces, width)
    predicted = survival(found.logits, (1.0,) * width)
    return Confidence(
        ece=by_position(ece, predicted, found.survived),
        auc=by_position(auc, predicted, found.survived),
    )
