"""Temperatures: values are raw or follow the request's own temperature, never a neighbour's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emberline.audit.compare import reproduce, shown
from emberline.audit.outcome import Fault, Finding, Outcome, judged
from emberline.audit.records import FLOOR, Answer, Ask, Key, TokenRecord, difference, temperature_of
from emberline.audit.session import Prompt, Session

_TEMPERATURES = (0.5, 1.0, 0.7, 1.4)


async def plain(session: Session) -> Outcome:
    """Default values beside requests of other temperatures: all raw, or each its own."""
    prompts, asks, answers, rows = await _drawn(session, session.settings.mode)
    raw = sum(
        difference(record, row) <= session.noise.most
        for ask, answer, own in zip(asks, answers, rows, strict=True)
        for record, row in zip(answer.records, own, strict=True)
        if ask.temperature != 1.0
    )
    total = sum(
        len(a.records) for ask, a in zip(asks, answers, strict=True) if ask.temperature != 1.0
    )
    is_raw = 2 * raw >= total
    findings = []
    for prompt, ask, answer, own in zip(prompts, asks, answers, rows, strict=True):
        temperature = 1.0 if is_raw else ask.temperature
        findings += _judge(session, prompt, ask, answer, own, temperature)
    kind = "raw, whatever the temperature" if is_raw else "after the request's own temperature"
    return judged(findings, f"{len(asks)} requests at once: values are {kind}", raw=is_raw)


async def processed(session: Session) -> Outcome:
    """`logprobs_mode: processed`: raw values after bias and temperature."""
    await session.needs("logprobs_mode", "processed", "no such mode")
    prompts, asks, answers, rows = await _drawn(session, "processed")
    findings = []
    for prompt, ask, answer, own in zip(prompts, asks, answers, rows, strict=True):
        findings += _judge(session, prompt, ask, answer, own, ask.temperature)
    findings += await _biased(session)
    return judged(findings, f"{len(asks)} requests at once, and one with a bias")


async def _drawn(
    session: Session, mode: str | None
) -> tuple[list[Prompt], list[Ask], list[Answer], list[tuple[TokenRecord, ...]]]:
    """Answers at mixed temperatures, drawn at once, and their prefill rows."""
    prompts = list(await session.prompts(len(_TEMPERATURES)))
    asks = [
        session.ask(
            prompt,
            temperature=temperature,
            seed=session.settings.seed + number,
            mode=mode,
        )
        for number, (prompt, temperature) in enumerate(zip(prompts, _TEMPERATURES, strict=True))
    ]
    answers = await session.together(asks)
    return prompts, asks, answers, await session.all_rows(prompts, answers)


async def _biased(session: Session) -> list[Finding]:
    prompt = (await session.prompts())[0]
    first = (await session.server.ask(session.ask(prompt, max_tokens=1))).records[0]
    ids = [int(one.key) for one in first.top[:2]]
    bias = {ids[0]: -1.5, ids[-1]: 1.0}
    ask = session.ask(
        prompt,
        temperature=0.8,
        seed=session.settings.seed,
        mode="processed",
        options={"logit_bias": {str(i): value for i, value in bias.items()}},
    )
    answer = await session.server.ask(ask)
    rows = await session.rows(prompt, answer)
    return _judge(session, prompt, ask, answer, rows, ask.temperature, bias)


def _judge(
    session: Session,
    prompt: Prompt,
    ask: Ask,
    answer: Answer,
    rows: Sequence[TokenRecord],
    temperature: float,
    bias: Mapping[Any, float] | None = None,
) -> list[Finding]:
    """Records whose differences are not the row's, biased and divided by `temperature`.

    A log-softmax keeps differences: log p_i - log p_j = (z_i + b_i - z_j - b_j) / T, so that no
    normaliser over the whole vocabulary is needed.
    """
    findings = []
    most = (
        2 * session.noise.most * (1 + 1 / temperature) or 1e-5
    )  # a division rounds, even in --exact
    for index, (record, row) in enumerate(zip(answer.records, rows, strict=True)):
        gap = scaled_difference(record, row, temperature, bias or {})
        if gap <= most:
            continue
        found = temperature_of(record, row)
        message = (
            f"prompt {prompt}, temperature {ask.temperature:g}, output token {index} "
            f"({record.key!r}): {shown(record)}, raw {shown(row)}: {gap:.6g} off at temperature "
            f"{temperature:g}" + (f", as if it were {found:.3g}" if found else "")
        )
        near = [
            other
            for other in _TEMPERATURES
            if found is not None and other != ask.temperature and abs(found / other - 1) < 0.03
        ]
        fault = Fault.TEMPERATURE if near else None
        findings.append(Finding(message, fault, reproduce(ask, answer, index)))
    return findings


def scaled_difference(
    record: TokenRecord, row: TokenRecord, temperature: float, bias: Mapping[Any, float]
) -> float:
    """How far differences in `record` are from those of the raw `row`, biased and divided."""
    values, raw = record.values, row.values

    def expected(key: Key) -> float:
        return (raw[key] + bias.get(key, 0.0)) / temperature

    common = [key for key in values if key in raw and values[key] > FLOOR and raw[key] > FLOOR]
    if not common:
        return float("inf")
    base = max(common, key=lambda key: raw[key])
    return max(
        abs((values[key] - values[base]) - (expected(key) - expected(base))) for key in common
    )
