"""Predicted output: where an answer stands in the text that its caller expects.

Owns finding the place, and finding it again after a difference. Must not know tensors, drafters or
what is done with the drafts: they are verified like any others.

While the answer follows the prediction, the tokens ahead are its drafts. Once it differs there are
none (a model's drafts take over, if there is a drafter) until the last tokens of the answer are met
again in the prediction: close ahead of where it left off for one or two of them, anywhere for more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WINDOW = 16
"""Tokens verified at once while the answer follows its prediction, the anchor among them."""
NEAR = 24
"""Positions ahead of the last agreement within which one common token is a meeting."""
LONGEST = 8
"""Tokens looked back at; more of them make no meeting surer."""
LOOKED_AT = 64
"""Places looked at for a meeting: the nearest ahead, and half as many behind."""
ANYWHERE = 3
"""Common tokens that make a meeting wherever they stand."""


class Prediction:
    """The place of one answer in its prediction. Fed every emitted token, in order."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = tuple(token_ids)
        self._places: dict[int, list[int]] = {}
        for place, token_id in enumerate(self._ids):
            self._places.setdefault(token_id, []).append(place)
        self._next: int | None = 0  # place of the token expected next; None: it has lost its way
        self._left_off = 0  # place after the last agreement
        self._recent: list[int] = []  # the last emitted tokens
        self._hits, self._misses = 0, 0

    def push(self, token_id: int) -> None:
        """Take in one emitted token."""
        self._recent = [*self._recent[1 - LONGEST :], token_id]
        place = self._next
        if place is not None and place < len(self._ids):
            if self._ids[place] == token_id:
                self._hits += 1
                self._next = self._left_off = place + 1
                return
            self._misses += 1
        self._next = self._meet()
        if self._next is not None:
            self._left_off = self._next

    def ahead(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that should come now; none while the way is lost."""
        return () if self._next is None else self._ids[self._next : self._next + limit]

    @property
    def confidence(self) -> float:
        """Chance that the next token comes as predicted, judged by those so far."""
        return (self._hits + 9) / (self._hits + self._misses + 10)

    def _meet(self) -> int | None:
        """The place after the best meeting of the answer's end with the prediction."""
        best: tuple[int, int] | None = None  # common tokens, minus the distance
        found = None
        places = self._places.get(self._recent[-1], [])
        middle = bisect_left(places, self._left_off)
        for place in places[max(0, middle - LOOKED_AT // 2) : middle + LOOKED_AT]:
            common = self._common(place)
            distance = abs(place - self._left_off)
            near = self._left_off <= place < self._left_off + NEAR
            if (common >= ANYWHERE or near) and (best is None or (common, -distance) > best):
                best, found = (common, -distance), place + 1
        return found

    def _common(self, place: int) -> int:
        """How many of the last emitted tokens stand at the end of the prediction up to `place`."""
        count = 0
        while (
            count < min(len(self._recent), place + 1)
            and self._recent[-1 - count] == self._ids[place - count]
        ):
            count += 1
        return count
