"""An audit from its settings to its results: opens the servers, runs one check after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import httpx

from emberline.audit.checks import CHECKS, Check
from emberline.audit.client import Broken, Features, Server
from emberline.audit.outcome import Finding, Malformed, NotSupported, Outcome, Verdict
from emberline.audit.reference import Reference
from emberline.audit.session import Session
from emberline.audit.settings import AuditError, AuditSettings, Noise, noise_of, require


class Observer(Protocol):
    """Told how the audit gets on."""

    def begins(self, check: Check, number: int, total: int) -> None:
        """A check begins."""
        ...

    def ends(self, result: Result) -> None:
        """It has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """A check and what came of it."""

    check: Check
    outcome: Outcome
    seconds: float


@dataclass(frozen=True, slots=True)
class Audit:
    """A whole audit."""

    url: str
    features: Features
    noise: Noise
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed, and at least one passed."""
        verdicts = [result.outcome.verdict for result in self.results]
        return Verdict.FAIL not in verdicts and Verdict.PASS in verdicts


def chosen(only: Sequence[str], skip: Sequence[str]) -> tuple[Check, ...]:
    """The checks to run. Raises `AuditError` for a name that is none."""
    names = [check.name for check in CHECKS]
    for option, given in (("--only", only), ("--skip", skip)):
        for name in given:
            require(name in names, f"{option} {name}: the checks are {', '.join(names)}")
    return tuple(
        check for check in CHECKS if (not only or check.name in only) and check.name not in skip
    )


async def audit(
    settings: AuditSettings,
    observer: Observer,
    *,
    checks: Sequence[Check] = CHECKS,
    reference: Reference | None = None,
) -> Audit:
    """Run the checks on one server.

    Raises:
        AuditError: it cannot begin: nobody answers, a key is wanted, no known dialect.
    """
    async with AsyncExitStack() as stack:
        server = await _open(stack, settings.url, settings)
        other = await _open(stack, settings.compare, settings) if settings.compare else None
        if settings.mode is not None:
            why = await server.lacks("logprobs_mode", settings.mode, "no such mode")
            require(why is None, f"--logprobs-mode {settings.mode}: {why}")
        noise = noise_of(settings, server.features.dtype)
        session = Session(server, settings, noise, other, reference)
        results = []
        for number, check in enumerate(checks):
            observer.begins(check, number, len(checks))
            began = time.perf_counter()
            outcome = await run_check(check, session)
            results.append(Result(check, outcome, time.perf_counter() - began))
            observer.ends(results[-1])
        return Audit(server.url, server.features, noise, tuple(results))


async def run_check(check: Check, session: Session) -> Outcome:
    """One check; what stops it is a verdict too."""
    try:
        return await check.run(session)
    except NotSupported as problem:
        return Outcome(Verdict.NOT_SUPPORTED, str(problem))
    except (Malformed, Broken) as problem:
        return Outcome(Verdict.FAIL, "", (Finding(str(problem)),))


async def _open(stack: AsyncExitStack, url: str, settings: AuditSettings) -> Server:
    try:
        server = await stack.enter_async_context(Server(url, settings))
        await server.discover()
    except httpx.InvalidURL as problem:
        raise AuditError(f"{url} is no address: {problem}") from None
    return server
