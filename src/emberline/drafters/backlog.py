"""Committed tokens whose entries in a draft's KV are not written yet.

A map of a few rows takes a CPU almost as long as one of several times as many. So rows are kept
until somebody reads, or there are enough of them: while nobody drafts, most steps write nothing.
Must not know how entries come from taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ENOUGH = 64  # rows: more together are hardly faster a row


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Committed tokens in the order in which they came."""

    taps: Tensor  # [N, A]
    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64, none of them twice


class Backlog:
    """Rows to be written.

    Args:
        write: writes the entries of some rows.
    """

    def __init__(self, write: Callable[[ContextRows], None]) -> None:
        self._write = write
        self._rows: list[ContextRows] = []

    def add(self, rows: ContextRows) -> None:
        """Write rows before anybody reads them."""
        if len(rows.slots):
            self._rows.append(rows)
            if sum(len(kept.slots) for kept in self._rows) >= ENOUGH:
                self.settle()

    def settle(self) -> None:
        """Write all that is left; what comes to a slot last stays."""
        kept, self._rows = self._rows, []
        if len(kept) > 1:
            slots = torch.cat([rows.slots for rows in kept])
            if len(set(slots.tolist())) == len(slots):
                taps = torch.cat([rows.taps for rows in kept])
                kept = [ContextRows(taps, torch.cat([rows.positions for rows in kept]), slots)]
        for rows in kept:
            self._write(rows)
