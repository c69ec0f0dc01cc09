"""The `/generate` requests that run, by the names that clients gave them.

Owns which name stands for which requests of the engine. Must not know what they are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from emberline.types import InvalidRequest


class RunningCalls:
    """Names and the engine's ids behind them. Of one event loop."""

    def __init__(self) -> None:
        self._ids: dict[str, Sequence[str]] = {}

    @contextmanager
    def hold(self, names: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Let names stand for the engine's ids until the end of the block.

        Raises:
            InvalidRequest: one of them stands for something already.
        """
        taken = sorted(names.keys() & self._ids.keys())
        if taken:
            raise InvalidRequest(f"rid {taken[0]!r} is in use: choose another", "rid")
        self._ids |= names
        try:
            yield
        finally:
            for name in names:
                del self._ids[name]

    def ids_of(self, name: str) -> Sequence[str]:
        """The engine's ids behind a name; none if nothing runs under it."""
        return self._ids.get(name, ())

    def all_ids(self) -> set[str]:
        """The engine's ids behind all names."""
        return set(chain.from_iterable(self._ids.values()))
