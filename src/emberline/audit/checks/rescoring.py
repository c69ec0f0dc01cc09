"""Rescoring: decode's values against the server's own prefill of the same tokens, and transformers.

The strongest check there is from outside: a prefill has no drafts, no acceptance and no rows to
choose from.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from emberline.audit.compare import reproduce, shown
from emberline.audit.diagnosis import diagnose, wrong_records
from emberline.audit.outcome import Finding, Outcome, judged, skipped
from emberline.audit.records import Answer, Ask, TokenRecord, margin, token_difference
from emberline.audit.session import Prompt, Session


async def alone(session: Session) -> Outcome:
    """Greedy and drawn answers, one at a time, streamed so that a step's tokens are known."""
    gaps = Gaps()
    findings: list[Finding] = []
    options = await session.rejecting()
    for number, prompt in enumerate(await session.prompts()):
        for temperature in (0.0, 1.0):
            ask = session.ask(
                prompt,
                temperature=temperature,
                seed=session.settings.seed + number,
                stream=True,
                options=options,
            )
            answer = await session.server.ask(ask)
            rows = await session.rows(prompt, answer)
            findings += judge_rows(session, prompt, ask, answer, rows, gaps)
    return _outcome(session, findings, gaps)


async def concurrent(session: Session) -> Outcome:
    """Answers to many requests at once, each against its own prefill and its neighbours'."""
    gaps = Gaps()
    findings: list[Finding] = []
    prompts = await session.prompts(session.settings.concurrency)
    options = await session.rejecting()
    asks = [
        session.ask(
            prompt,
            temperature=float(number % 2),
            seed=session.settings.seed + number,
            stream=True,
            options=options,
            num_top=session.settings.num_top,
        )
        for number, prompt in enumerate(prompts)
    ]
    answers = await session.together(asks)
    rows = await session.all_rows(prompts, answers)
    for number, prompt in enumerate(prompts):
        # The same prompt beside itself is no neighbour: its rows are this one's own.
        beside = [rows[i] for i, other in enumerate(prompts) if other != prompt]
        findings += judge_rows(
            session, prompt, asks[number], answers[number], rows[number], gaps, beside
        )
    return _outcome(session, findings, gaps)


async def reference(session: Session) -> Outcome:
    """The same tokens under plain transformers in float32; near ties are no errors."""
    plain = session.reference
    if plain is None:
        return skipped("no --reference was given")
    gaps, num_ties = Gaps(), 0
    findings: list[Finding] = []
    most = session.noise.reference
    asked = [(prompt, warm) for prompt in await session.known_prompts() for warm in (0.0, 1.0)]
    asks = [
        session.ask(prompt, temperature=warm, seed=session.settings.seed + number)
        for number, (prompt, warm) in enumerate(asked)
    ]
    answers = await session.together(asks)
    for (prompt, _), ask, answer in zip(asked, asks, answers, strict=True):
        ids = prompt.ids + answer.ids
        rows = await asyncio.to_thread(plain.rows, ids, len(prompt.ids), ask.num_top)
        for index, (record, row) in enumerate(zip(answer.records, rows, strict=True)):
            gap = token_difference(record, row)
            gaps.add(index, gap)
            where = f"prompt {prompt}, temperature {ask.temperature:g}, output token {index}"
            found = []
            if gap > most:
                found.append(f"({record.key!r}): {shown(record)}, {plain.name} {shown(row)}")
            behind = -(margin(row, row.top[0].key) or 0.0) if ask.temperature == 0 else 0.0
            num_ties += 0 < behind <= 2 * most
            if behind > 2 * most:
                best = row.top[0].key
                found.append(f"{record.key!r} is not the likeliest: {best!r} leads by {behind:.6g}")
            again = reproduce(ask, answer, index)
            findings += [Finding(f"{where}: {problem}", None, again) for problem in found]
    note = f"{gaps.note()} from {plain.name}, {num_ties} near ties"
    return judged(findings, note, near_ties=num_ties, **gaps.figures())


class Gaps:
    """Differences of chosen tokens' values, by output position."""

    def __init__(self) -> None:
        self._by_position: dict[int, list[float]] = defaultdict(list)

    def add(self, position: int, gap: float) -> None:
        """One more."""
        self._by_position[position].append(gap)

    @property
    def all(self) -> list[float]:
        """Every difference."""
        return [gap for gaps in self._by_position.values() for gap in gaps]

    @property
    def mean(self) -> float:
        """Of all."""
        return sum(self.all) / max(1, len(self.all))

    def figures(self) -> dict[str, Any]:
        """The largest, the mean, and the largest by position."""
        by_position = [max(self._by_position[i]) for i in sorted(self._by_position)]
        return {
            "tokens": len(self.all),
            "max": max(self.all, default=0.0),
            "mean": self.mean,
            "max_by_position": by_position,
        }

    def note(self) -> str:
        """In words."""
        largest = max(self.all, default=0.0)
        return f"{len(self.all)} tokens, max {largest:.3g}, mean {self.mean:.3g}"


def judge_rows(
    session: Session,
    prompt: Prompt,
    ask: Ask,
    answer: Answer,
    rows: Sequence[TokenRecord],
    gaps: Gaps,
    beside: Sequence[Sequence[TokenRecord]] = (),
) -> list[Finding]:
    """Every record that is not its prefill row's, with its probable cause."""
    for index, (record, row) in enumerate(zip(answer.records, rows, strict=True)):
        gaps.add(index, token_difference(record, row))
    most = session.noise.most
    wrong = wrong_records(answer, rows, most)
    causes = diagnose(wrong, answer, rows, noise=session.noise.reference, beside=beside)
    return [
        Finding(
            f"prompt {prompt}, temperature {ask.temperature:g}, output token {one.index} "
            f"({one.record.key!r}): decode {shown(one.record)}, prefill {shown(one.row)}: "
            f"{one.gap:.6g} apart",
            causes[one.index],
            reproduce(ask, answer, one.index),
        )
        for one in wrong
    ]


def _outcome(session: Session, findings: list[Finding], gaps: Gaps) -> Outcome:
    if not findings and gaps.mean > session.noise.mean:
        message = f"the mean difference is {gaps.mean:.6g}, more than {session.noise.mean:g}"
        findings = [Finding(message)]
    return judged(findings, gaps.note(), **gaps.figures())
