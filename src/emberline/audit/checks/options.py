"""Sampling options: they do what they say at every position, and raw values do not show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from emberline.audit.checks.rescoring import Gaps, judge_rows
from emberline.audit.compare import reproduce
from emberline.audit.outcome import Finding, Outcome, judged, skipped
from emberline.audit.records import Answer, Ask, TokenRecord
from emberline.audit.session import Prompt, Session

_FREQUENCY, _PRESENCE = 1.2, 0.6


async def raw_invariance(session: Session) -> Outcome:
    """Answers drawn with top-p, top-k and a bias, against a prefill that has no options."""
    if session.settings.mode == "processed":
        return skipped("processed values are those of the options")
    prompts = await session.known_prompts()
    first = await session.server.ask(session.ask(prompts[0], max_tokens=2))
    biased = {str(key): -2.0 for key in first.keys}
    gaps, findings = Gaps(), []
    for number, options in enumerate(
        ({"top_p": 0.8}, {"top_k": 5}, {"logit_bias": biased}, {"presence_penalty": 1.0})
    ):
        prompt = prompts[number % len(prompts)]
        ask = session.ask(
            prompt, temperature=1.0, seed=session.settings.seed + number, options=options
        )
        answer = await session.server.ask(ask)
        rows = await session.rows(prompt, answer)
        found = judge_rows(session, prompt, ask, answer, rows, gaps)
        findings += [
            Finding(f"{options}: {one.message}", one.fault, one.reproduce) for one in found
        ]
    return judged(findings, gaps.note(), **gaps.figures())


async def logit_bias(session: Session) -> Outcome:
    """A bias of 100 forces a token everywhere, one of -100 bans it everywhere."""
    findings = []
    prompt = (await session.known_prompts())[0]
    plain = await session.server.ask(session.ask(prompt))
    forced = plain.ids[len(plain.ids) // 2]
    banned = plain.ids[0]
    ask = session.ask(prompt, options={"logit_bias": {str(forced): 100}})
    answer = await session.server.ask(ask)
    strays = [i for i, key in enumerate(answer.keys) if key != forced]
    if strays:
        message = f"prompt {prompt}, logit_bias {{{forced}: 100}}: other tokens at {strays}"
        findings.append(Finding(message, None, reproduce(ask, answer, strays[0])))
    ask = session.ask(prompt, options={"logit_bias": {str(banned): -100}})
    answer = await session.server.ask(ask)
    strays = [i for i, key in enumerate(answer.keys) if key == banned]
    if strays:
        message = f"prompt {prompt}, logit_bias {{{banned}: -100}}: it comes at {strays}"
        findings.append(Finding(message, None, reproduce(ask, answer, strays[0])))
    return judged(findings, f"{2 * session.settings.num_tokens} greedy tokens")


async def penalties(session: Session) -> Outcome:
    """Greedy answers with penalties: every token leads once the tokens before it are counted.

    Penalties are of the output so far, so inside a block each position has its own.
    """
    findings: list[Finding] = []
    prompts = await session.known_prompts()
    options = {"frequency_penalty": _FREQUENCY, "presence_penalty": _PRESENCE}
    asks = [session.ask(prompt, options=options) for prompt in prompts]
    answers = await session.together(asks)
    all_rows = await session.all_rows(prompts, answers)
    for prompt, ask, answer, rows in zip(prompts, asks, answers, all_rows, strict=True):
        findings += _penalised(session, prompt, ask, answer, rows)
    return judged(findings, f"{len(prompts)} answers")


def _penalised(
    session: Session, prompt: Prompt, ask: Ask, answer: Answer, rows: Sequence[TokenRecord]
) -> list[Finding]:
    """The tokens that something else would have led."""
    seen: Counter[object] = Counter()
    findings = []
    for index, row in enumerate(rows):
        adjusted = {
            key: value - _FREQUENCY * seen[key] - _PRESENCE * (seen[key] > 0)
            for key, value in row.values.items()
        }
        best = max(adjusted, key=lambda key: adjusted[key])
        behind = adjusted[best] - adjusted[row.key]
        if behind > 2 * session.noise.most + 1e-5:
            message = (
                f"prompt {prompt}, {dict(ask.options)}, output token {index}: {row.key!r} is "
                f"{behind:.6g} behind {best!r} once the tokens before it are counted"
            )
            findings.append(Finding(message, None, reproduce(ask, answer, index)))
        seen[row.key] += 1
    return findings
