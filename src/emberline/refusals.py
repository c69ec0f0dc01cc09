"""Why a request is not taken: the errors, and the checks of single values that raise them.

Every refusal names the field and says the remedy. Must not know which fields there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InvalidRequest(ValueError):
    """A request that can never run. `param` names the field, the message says the remedy."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@contextmanager
def one_of(index: int, count: int) -> Iterator[None]:
    """In it, a refusal says which prompt of several it is about."""
    try:
        yield
    except InvalidRequest as problem:
        if count == 1:
            raise
        which = f"number {index + 1} of {count}"
        raise InvalidRequest(f"{problem} ({which})", problem.param) from None


class QueueFull(RuntimeError):
    """The waiting queue is at its limit; try again after `retry_after` seconds."""

    def __init__(self, limit: int, retry_after: int = 1) -> None:
        super().__init__(f"the queue of {limit} requests is full; try again in {retry_after} s")
        self.limit, self.retry_after = limit, retry_after


def in_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse what is no finite number between the two."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}", name)
    if value < low or value > high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value}", name)


def is_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse what is no integer between the two; without `high` any is small enough."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequest(f"{name} must be {limit}, got {value}", name)


def is_list(name: str, value: object) -> None:
    """Refuse what cannot be looked through; a text can, but is no list."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list, got {value!r}", name)
