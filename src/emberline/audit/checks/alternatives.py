"""Alternatives: the first of them at temperature 0, and values of ids that a request chose."""

from __future__ import annotations

from dataclasses import replace

from emberline.audit.compare import reproduce, shown
from emberline.audit.outcome import Fault, Finding, NotSupported, Outcome, judged
from emberline.audit.records import Answer, Ask, apart, uniform_over
from emberline.audit.session import Session

_LENGTHS = (2, 3, 1, 4)
_FIRST_IDS = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


async def top(session: Session) -> Outcome:
    """Greedy: the token's value is the same float as the first alternative's, tokens alike."""
    findings, count = [], 0
    prompts = await session.prompts()
    asks = [session.ask(prompt) for prompt in prompts]
    for prompt, ask, answer in zip(prompts, asks, await session.together(asks), strict=True):
        for index, record in enumerate(answer.records):
            count += 1
            first = record.top[0] if record.top else None
            tied = first is not None and any(
                one.key == record.key and one.logprob == first.logprob for one in record.top
            )
            if tied and first is not None and record.logprob == first.logprob:
                continue
            findings.append(
                Finding(
                    f"prompt {prompt}, output token {index} ({record.key!r}): {shown(record)}",
                    None if uniform_over(record) is None else Fault.ZERO_ROW,
                    reproduce(ask, answer, index),
                )
            )
    return judged(findings, f"{count} greedy tokens", tokens=count)


async def token_ids(session: Session) -> Outcome:
    """Requests with id lists of unequal lengths, together and alone: the same values."""
    asks = []
    for index, prompt in enumerate(await session.prompts(8)):
        length = _LENGTHS[index % len(_LENGTHS)]
        ids = tuple(_FIRST_IDS[(3 * index + k) % len(_FIRST_IDS)] + index for k in range(length))
        asks.append(session.ask(prompt, max_tokens=8, score_ids=ids))
    plain = replace(asks[0], max_tokens=1)
    answer = await session.server.ask(plain)
    if not all(set(plain.score_ids) <= record.chosen.keys() for record in answer.records):
        raise NotSupported("the values of chosen ids are not in the answer")
    together = await session.together(asks)
    findings: list[Finding] = []
    for number, (ask, beside) in enumerate(zip(asks, together, strict=True)):
        alone = await session.server.ask(ask)
        what = f"request {number} of {len(asks)}, ids {list(ask.score_ids)}"
        findings += _judge(what, ask, beside, alone, session.noise.most)
    return judged(findings, f"{len(asks)} requests, lists of {_LENGTHS} ids")


def _judge(what: str, ask: Ask, beside: Answer, alone: Answer, most: float) -> list[Finding]:
    findings = []
    for index, record in enumerate(beside.records):
        where, again = f"{what}, output token {index}", reproduce(ask, beside, index)
        missing = [i for i in ask.score_ids if i not in record.chosen]
        if missing:
            findings.append(Finding(f"{where}: no value for {missing}", None, again))
            continue
        listed = {one.key: one.logprob for one in record.top}
        for i in ask.score_ids:
            if i in listed and apart(listed[i], record.chosen[i]) > most:
                message = f"{where}: id {i} has {record.chosen[i]:.6g}, listed as {listed[i]:.6g}"
                findings.append(Finding(message, None, again))
        if beside.keys[: index + 1] != alone.keys[: index + 1]:
            return findings  # what comes after another token is no longer comparable
        other = alone.records[index].chosen
        for i in ask.score_ids:
            if i in other and apart(record.chosen[i], other[i]) > most:
                values = f"{record.chosen[i]:.6g} beside others, {other[i]:.6g} alone"
                findings.append(Finding(f"{where}: id {i} has {values}", None, again))
    return findings
