"""Probable causes of a wrong record, told from what it equals instead.

A record is compared with the server's own prefill rows: of the same answer one entry away, of the
answers beside it, and with what no model says (a uniform row). What equals none of them is another
distribution: after a rejection a token comes from the residual, before it from the draft, and the
place in a stream's event tells which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emberline.audit.outcome import Fault
from emberline.audit.records import Answer, TokenRecord, difference, uniform_over


@dataclass(frozen=True, slots=True)
class Wrong:
    """A record that differs from its prefill row."""

    index: int  # of the output token
    record: TokenRecord
    row: TokenRecord
    gap: float


def wrong_records(answer: Answer, rows: Sequence[TokenRecord], most: float) -> tuple[Wrong, ...]:
    """The records that differ from their rows by more than `most`."""
    pairs = enumerate(zip(answer.records, rows, strict=False))
    found = [Wrong(i, record, row, difference(record, row)) for i, (record, row) in pairs]
    return tuple(one for one in found if one.gap > most)


def diagnose(
    wrong: Sequence[Wrong],
    answer: Answer,
    rows: Sequence[TokenRecord],
    *,
    noise: float,
    beside: Sequence[Sequence[TokenRecord]] = (),
) -> Mapping[int, Fault | None]:
    """The probable cause of each wrong record, by output token.

    Args:
        wrong: from `wrong_records`.
        answer: the answer that they are of.
        rows: its prefill rows.
        noise: of the dtype. What differs by no more, where --exact forgives nothing, has no cause.
        beside: prefill rows of answers that were under way at the same time.
    """
    causes: dict[int, Fault | None] = {}
    unknown = []
    for one in wrong:
        cause = _known(one, rows, noise, beside)
        if cause is None:
            unknown.append(one)
        causes[one.index] = cause
    unknown = [one for one in unknown if one.gap > noise]
    known = [cause for cause in causes.values() if cause is not None]
    # Rows of drafts that were not emitted are nobody's: what explains the others explains them.
    cause = max(known, key=known.count) if known else _distribution(unknown, answer)
    return causes | {one.index: cause for one in unknown}


def _known(
    one: Wrong, rows: Sequence[TokenRecord], noise: float, beside: Sequence[Sequence[TokenRecord]]
) -> Fault | None:
    """The row that the record equals, if it is one of the model's at another place."""
    record = one.record
    if uniform_over(record) is not None:
        return Fault.ZERO_ROW
    best, cause = min(noise, one.gap / 2), None
    near = [rows[i] for i in (one.index - 1, one.index + 1) if 0 <= i < len(rows)]
    candidates = [(Fault.ROW_SHIFTED, near), *((Fault.NEIGHBOUR, other) for other in beside)]
    for fault, places in candidates:
        for row in places:
            gap = difference(record, row) if _overlap(record, row) else math.inf
            if gap < best or (gap == 0 and cause is None):
                best, cause = gap, fault
    return cause


def _overlap(record: TokenRecord, row: TokenRecord) -> bool:
    """Whether two records list enough of the same tokens to be called equal."""
    common = len(record.values.keys() & {alternative.key for alternative in row.top})
    return common >= min(2, len(row.top))


def _distribution(unknown: Sequence[Wrong], answer: Answer) -> Fault | None:
    """Draft or residual: the residual is where a step ends, and a draft's tokens are before it."""
    ends = [answer.ends_event(one.index) for one in unknown]
    if None in ends:
        return None
    sizes = set(answer.events[1:])  # the first event is the prompt's own token
    return Fault.RESIDUAL if all(ends) and sizes - {1} else Fault.DRAFT
