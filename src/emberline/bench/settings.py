"""What a measurement is told: the server, the request, the load. Values that validate themselves.

Must not know how requests are sent or prompts are made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

Endpoint = Literal["chat", "completions"]
PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

# What the tool itself decides: a body that changed these would not be the one measured.
RESERVED = ("model", "prompt", "messages", "stream", "stream_options", "n", "best_of")


_FRAMING = ("content-length", "transfer-encoding", "connection", "accept-encoding")


class BenchError(Exception):
    """What the caller can put right: one line that names the setting and the remedy."""


def require(holds: bool, message: str) -> None:
    """Raise `BenchError` with `message` unless `holds`."""
    if not holds:
        raise BenchError(message)


def _is_plain(text: str, blanks: str = "") -> bool:
    return all("!" <= letter <= "~" or letter in blanks for letter in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where requests go. `base_url` may end in /v1 or not."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: Endpoint = "chat"
    model: str | None = None  # None: the one that the server lists
    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = 600.0  # seconds a request may take

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname)
            sound = sound and parts.port != 0 and _is_plain(self.base_url)
        except ValueError:
            sound = False
        require(sound, f"--base-url must be http(s)://HOST[:PORT], got {self.base_url!r}")
        require(
            not (parts.query or parts.fragment or parts.username),
            "--base-url must have no query, fragment or user; keys go to --api-key or --header",
        )
        for name, value in self.request_headers.items():
            require(
                bool(re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name)) and _is_plain(value, " \t"),
                "--header and --api-key want 'Name: value' of printable ASCII",
            )
            require(name not in _FRAMING, f"--header may not set {name}")
        require(self.timeout > 0, f"--timeout must be over 0 seconds, got {self.timeout}")

    @property
    def root(self) -> str:
        """The URL that /v1/... and /metrics are put behind."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def url(self) -> str:
        """The URL that measured requests are posted to."""
        return self.root + PATHS[self.endpoint]

    @property
    def request_headers(self) -> dict[str, str]:
        """Headers of every request, the key's included; later ones win."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **{name.lower(): value for name, value in self.headers}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """What is asked besides the prompt."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None  # sent to the server; None: not sent
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives a token
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, f"--max-tokens must be at least 1, got {self.max_tokens}")
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"--temperature must be 0 or more, got {self.temperature}",
        )
        require(
            self.logprobs is None or self.logprobs >= 0,
            f"--logprobs must be 0 or more, got {self.logprobs}",
        )
        for name in RESERVED:
            require(name not in self.extra_body, f"--extra-body may not set {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompts:
    """Prompts of random tokens: lengths are uniform in [(1 - r) * len, (1 + r) * len]."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0  # r
    shared_prefix_len: int = 0  # tokens that all prompts begin with, on top of input_len
    id_range: tuple[int, int] = (1000, 30_000)  # half-open; ordinary tokens of common vocabularies

    def __post_init__(self) -> None:
        require(self.input_len >= 1, f"--random-input-len must be at least 1, got {self.input_len}")
        require(
            self.output_len >= 1, f"--random-output-len must be at least 1, got {self.output_len}"
        )
        require(
            0 <= self.range_ratio < 1,
            f"--random-range-ratio must be in [0, 1), got {self.range_ratio}",
        )
        require(
            self.shared_prefix_len >= 0,
            f"--shared-prefix-len must be 0 or more, got {self.shared_prefix_len}",
        )
        low, high = self.id_range
        require(0 <= low < high, f"--random-id-range must be 0 <= LOW < HIGH, got {low} {high}")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of users, each of whom asks again as soon as the answer is there."""

    concurrency: int

    def __post_init__(self) -> None:
        require(self.concurrency >= 1, f"--concurrency must be at least 1, got {self.concurrency}")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that arrive as a Poisson process, however slow the answers are."""

    request_rate: float  # requests per second; infinity: all at once

    def __post_init__(self) -> None:
        require(self.request_rate > 0, f"--request-rate must be over 0, got {self.request_rate}")


Level = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The levels of load, one after the other, and how much of each."""

    levels: tuple[Level, ...]
    num_requests: int | None = None  # a level
    duration: float | None = None  # seconds a level in which requests begin
    warmup: int = 0  # requests before each level that are not counted
    seed: int = 0  # of arrivals, random prompts and the order of a shuffled dataset

    def __post_init__(self) -> None:
        require(
            (self.num_requests is None) != (self.duration is None),
            "--num-requests and --duration contradict each other: give one",
        )
        count, seconds = self.num_requests, self.duration
        require(count is None or count >= 1, f"--num-requests must be at least 1, got {count}")
        require(
            seconds is None or (math.isfinite(seconds) and seconds > 0),
            f"--duration must be over 0 seconds, got {seconds}",
        )
        require(self.warmup >= 0, f"--warmup must be 0 or more, got {self.warmup}")
        require(self.seed >= 0, f"--seed must be 0 or more, got {self.seed}")
        endless = any(isinstance(level, OpenLoop) and math.isinf(level.request_rate)
                      for level in self.levels)  # fmt: skip
        require(
            not (endless and seconds is not None),
            "--request-rate inf needs --num-requests: in a --duration it would never end",
        )
