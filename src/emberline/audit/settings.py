"""What an audit is asked to do, and the noise that is forgiven. Knows no HTTP and no check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Api = Literal["auto", "openai", "native"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Mode = Literal["raw", "processed"]

NOISE = {"float32": 1e-4, "float16": 0.06, "bfloat16": 0.5}
"""Most by which two right computations of one log-probability may differ, by dtype.

Decode and prefill run different kernels, so their sums round differently. In float32 the difference
stays under 1e-5 for models of any size; bfloat16 keeps 8 bits, and a logit of 30 moves in steps of
0.125: differences of 0.25 are seen on GPUs, 0.36 at worst. float16 keeps three bits more.
"""
MEAN_SHARE = 0.1
"""The mean difference may be this share of the largest one that is forgiven."""


class AuditError(Exception):
    """The audit cannot begin; the message is one line that says what to do."""


def require(holds: bool, message: str) -> None:
    """Raise `AuditError` unless `holds`."""
    if not holds:
        raise AuditError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """One audit. Raises `AuditError` naming the option on a value that has no meaning."""

    url: str
    compare: str | None = None  # a second server with the same model
    api: Api = "auto"
    model: str | None = None  # the one listed if absent
    api_key: str | None = None
    dtype: Dtype = "auto"  # auto: what the server says, else bfloat16
    tolerance: float | None = None  # None: the dtype's noise
    mode: Mode | None = None  # logprobs_mode of every request; None: what the server does unasked
    exact: bool = False  # nothing is forgiven where a server is compared with itself
    num_tokens: int = 32  # most tokens of an answer
    num_prompts: int = 4
    concurrency: int = 8
    block: int | None = None  # most drafts a step; None: what the server says, else 8
    num_samples: int = 1024  # continuations drawn by the distribution check
    num_top: int = 5  # alternatives a token
    seed: int = 0
    timeout: float = 300.0  # seconds a request may take

    def __post_init__(self) -> None:
        for name, url in (("URL", self.url), ("--compare", self.compare)):
            if url is not None:
                require(
                    url.startswith(("http://", "https://")),
                    f"{name} must begin with http:// or https://, got {url!r}",
                )
        if self.tolerance is not None:
            require(
                math.isfinite(self.tolerance) and self.tolerance >= 0,
                f"--tolerance must be a finite number of at least 0, got {self.tolerance}",
            )
        for option, value, low, high in (
            ("--tokens", self.num_tokens, 4, 1024),
            ("--prompts", self.num_prompts, 2, 8),
            ("--concurrency", self.concurrency, 2, 256),
            ("--samples", self.num_samples, 64, 1_000_000),
            ("--top", self.num_top, 2, 1024),
            ("--block", self.block if self.block is not None else 1, 1, 256),
        ):
            require(low <= value <= high, f"{option} must be {low} to {high}, got {value}")
        require(self.timeout > 0, f"--timeout must be more than 0 seconds, got {self.timeout}")


@dataclass(frozen=True, slots=True)
class Noise:
    """What is forgiven, in nats: of a single value, of the mean of many, against a reference."""

    most: float
    mean: float
    reference: float  # another implementation rounds elsewhere, whatever a server owes itself
    why: str = ""

    def tells_draws(self) -> bool:
        """Whether draws from one seed must agree: noise this small rarely moves one."""
        return self.most <= 1e-3


def noise_of(settings: AuditSettings, reported: str | None) -> Noise:
    """The noise to forgive. `reported`: the dtype that the server says it computes in, if any."""
    given = settings.tolerance
    if given is not None:
        return Noise(given, given, given, f"--tolerance {given:g}")
    dtype, why = settings.dtype, "--dtype"
    if dtype == "auto":
        named = (reported or "").removeprefix("torch.")
        known = next((name for name in NOISE if name == named), None)
        dtype = known or "bfloat16"  # type: ignore[assignment]
        why = "as the server says" if known else "assumed: the server does not say; give --dtype"
    if settings.exact:
        return Noise(0.0, 0.0, NOISE[dtype], "--exact")
    return Noise(NOISE[dtype], NOISE[dtype] * MEAN_SHARE, NOISE[dtype], f"{dtype}, {why}")
