"""One shape for what every dialect says of a token, and how far two of them lie apart.

Knows neither HTTP nor what a difference means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

FLOOR = -9000.0
"""Values under this stand for minus infinity, which JSON cannot carry."""

LEAST_VOCAB = 128
"""No model has fewer tokens."""

Key = int | str  # a token: its id, or its text where a server does not tell ids


class Alternative(NamedTuple):
    """A token that could have come, and its log-probability."""

    key: Key
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What a server says of one token."""

    key: Key
    logprob: float | None  # None: the first token of a prompt
    top: tuple[Alternative, ...] = ()  # most likely first
    chosen: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def values(self) -> dict[Key, float]:
        """Every value that it gives, by token."""
        values = {one.key: one.logprob for one in self.top}
        if self.logprob is not None:
            values[self.key] = self.logprob
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice of an answer."""

    text: str  # OpenAI's dialect puts the prompt before it where the prompt was scored
    records: tuple[TokenRecord, ...]
    finish_reason: str | None = None
    completion_tokens: int | None = None  # of the whole call
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt: tuple[TokenRecord, ...] = ()  # of the prompt's tokens, where they were scored
    events: tuple[int, ...] = ()  # of a stream: the records of each event that had some

    @property
    def keys(self) -> tuple[Key, ...]:
        """The tokens."""
        return tuple(record.key for record in self.records)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of an answer whose server tells ids; -1 stands for one that it does not."""
        return tuple(key if isinstance(key, int) else -1 for key in self.keys)

    def ends_event(self, index: int) -> bool | None:
        """Whether token `index` is the last of its event; None if the answer was not streamed."""
        if not self.events:
            return None
        total = 0
        for size in self.events:
            total += size
            if index < total:
                return index == total - 1
        return None

    def begins_event(self, index: int) -> int:
        """The first token of the event that token `index` came in."""
        total = 0
        for size in self.events:
            if index < total + size:
                return total
            total += size
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, in no dialect."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    num_top: int = 5
    seed: int | None = None
    stream: bool = False
    n: int = 1
    score_ids: tuple[int, ...] = ()  # ids whose values are wanted at every position
    score_prompt: bool = False
    ignore_eos: bool = True
    mode: str | None = None  # logprobs_mode, where one is asked for
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def shown(self) -> dict[str, Any]:
        """What of it makes an answer come out as it does."""
        shown = {"temperature": self.temperature, "seed": self.seed, **self.options}
        return {name: value for name, value in shown.items() if value is not None}


def clean(logprob: float) -> float:
    """Every way of writing minus infinity as one value."""
    return -math.inf if logprob < FLOOR else logprob


def apart(a: float, b: float) -> float:
    """How far two log-probabilities lie apart; nothing is near NaN."""
    a, b = clean(a), clean(b)
    if a == b:
        return 0.0
    difference = abs(a - b)
    return math.inf if math.isnan(difference) else difference


def difference(a: TokenRecord, b: TokenRecord) -> float:
    """Largest difference between two records of one distribution, the chosen tokens included.

    A token that only one of them lists must lie under the other's last alternative; by how much it
    does not counts as difference. (The chosen token is listed however unlikely it is: it is no
    such alternative.)
    """
    worst = 0.0
    for one, other in ((a, b), (b, a)):
        values, listed = one.values, other.values
        ranked = [clean(one.logprob) for one in other.top if one.key != other.key]
        last = min(ranked, default=None)
        for key, value in values.items():
            if key in listed:
                worst = max(worst, apart(value, listed[key]))
            elif last is not None:
                worst = max(worst, value - last if math.isfinite(value) else 0.0)
    return worst


def token_difference(a: TokenRecord, b: TokenRecord) -> float:
    """Difference between the values of one chosen token in two records."""
    if a.logprob is None or b.logprob is None:
        return 0.0 if a.logprob is b.logprob else math.inf
    return apart(a.logprob, b.logprob)


def uniform_over(record: TokenRecord) -> int | None:
    """Of how many tokens the record could be a uniform row: one that was never written.

    None where its values differ, or are too large for a vocabulary: in bfloat16 the likeliest
    tokens are often tied.
    """
    values = list(record.values.values())
    if len(values) < 2 or max(values) - min(values) > 1e-6 or values[0] > -math.log(LEAST_VOCAB):
        return None
    return round(math.exp(min(-values[0], 50.0)))


def margin(record: TokenRecord, key: Key) -> float | None:
    """By how much the record's own token leads `key`; None if it does not list `key`."""
    value = record.values.get(key)
    if value is None or record.logprob is None:
        return None
    return record.logprob - value


def temperature_of(record: TokenRecord, row: TokenRecord) -> float | None:
    """The temperature that makes the raw `row` what `record` says, None if none does.

    softmax(z / T) keeps the order of differences: log p_i - log p_j = (z_i - z_j) / T.
    """
    values, raw = record.values, row.values
    common = [key for key in values if key in raw and values[key] > FLOOR and raw[key] > FLOOR]
    if len(common) < 3:
        return None
    high = max(common, key=lambda key: raw[key])
    low = min(common, key=lambda key: raw[key])
    ours, theirs = values[high] - values[low], raw[high] - raw[low]
    if ours <= 1e-3 or theirs <= 1e-3:
        return None
    scale = ours / theirs
    for key in common:
        expected = (raw[key] - raw[low]) * scale
        if abs(values[key] - values[low] - expected) > 0.02 * ours + 1e-3:
            return None
    return 1 / scale
