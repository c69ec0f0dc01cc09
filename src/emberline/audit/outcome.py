"""What a check came to: verdict, findings with their probable cause, figures. Knows no check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class Verdict(StrEnum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    SKIPPED = "skipped"
    NOT_SUPPORTED = "not supported"


class Fault(StrEnum):
    """A probable cause, told from the shape of what is wrong."""

    ROW_SHIFTED = "row shifted by one"
    NEIGHBOUR = "neighbour's row"
    ZERO_ROW = "zero row"
    DRAFT = "draft's logprob"
    RESIDUAL = "residual's logprob"
    PAST_STOP = "logprobs past a stop"
    REPEATED = "repeated alternatives in a stream chunk"
    TEMPERATURE = "temperature of another request"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in words that let it be found again."""

    message: str
    fault: Fault | None = None
    reproduce: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check."""

    verdict: Verdict
    note: str = ""  # what was looked at, or why nothing was
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The probable causes, each once, the most frequent first."""
        named = [finding.fault for finding in self.findings if finding.fault is not None]
        return tuple(sorted(set(named), key=lambda fault: (-named.count(fault), fault)))


def judged(findings: Sequence[Finding], note: str, **figures: Any) -> Outcome:
    """Pass if nothing was found, else fail."""
    return Outcome(Verdict.FAIL if findings else Verdict.PASS, note, tuple(findings), figures)


def skipped(why: str) -> Outcome:
    """Not run, and why."""
    return Outcome(Verdict.SKIPPED, why)


class NotSupported(Exception):
    """The server lacks what a check needs; the message is what it said."""


class Malformed(Exception):
    """An answer that is not of its dialect's shape: the message names the field."""
