"""Shapes: the fields that typed clients read are there, finite, and are log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from emberline.audit import openai_api
from emberline.audit.openai_api import of
from emberline.audit.outcome import Fault, Finding, NotSupported, Outcome, judged
from emberline.audit.records import FLOOR, TokenRecord, uniform_over
from emberline.audit.session import Session

_ABOVE = 1e-5  # a log-softmax in float32 may come out this much above 0
_MESSAGES = [{"role": "user", "content": "Name three colors."}]


async def answers(session: Session) -> Outcome:
    """Completions, or the native route: greedy and drawn."""
    findings: list[Finding] = []
    count = 0
    asked = [(prompt, warm) for prompt in await session.prompts() for warm in (0.0, 1.0)]
    seed = session.settings.seed
    asks = [session.ask(prompt, temperature=warm, seed=seed) for prompt, warm in asked]
    for (prompt, warm), answer in zip(asked, await session.together(asks), strict=True):
        what = f"prompt {prompt}, temperature {warm:g}"
        count += len(answer.records)
        # By text, alternatives of one text are one entry of completions: how many came is open.
        expected = session.settings.num_top if session.server.features.ids else 0
        findings += records_findings(what, answer.records, expected)
    if session.server.features.api == "openai":
        findings += await _raw_completion(session)
    return judged(findings, f"{count} records", records=count)


async def chat(session: Session) -> Outcome:
    """Chat's entries, streamed and not."""
    if not session.server.features.openai:
        raise NotSupported("the server is asked in the native dialect, which has no chat")
    body = chat_body(session)
    reply = await session.server.post(openai_api.CHAT, body)
    choice = of(reply, "choices", list)[0]
    of(of(choice, "message", dict), "content", str)
    of(choice, "finish_reason", str)
    entries = of(of(choice, "logprobs", dict), "content", list)
    findings = list(_entry_findings("chat", entries))
    events = await session.server.events(openai_api.CHAT, {**body, "stream": True})
    streamed = stream_entries(events)
    findings += _entry_findings("chat, streamed", streamed)
    for what, some in (("chat", entries), ("chat, streamed", streamed)):
        records = openai_api.chat_records(some)
        findings += records_findings(what, records, session.settings.num_top)
        findings += [
            Finding(f"{what}, token {i}: alternatives are not sorted: {one.top}")
            for i, one in enumerate(records)
            if any(a.logprob < b.logprob for a, b in zip(one.top, one.top[1:], strict=False))
        ]
    return judged(findings, f"{len(entries) + len(streamed)} entries")


def chat_body(session: Session) -> dict[str, Any]:
    """The chat that is asked, streamed and not."""
    body = {
        "model": session.server.features.model,
        "messages": _MESSAGES,
        "temperature": 0,
        "max_tokens": session.settings.num_tokens,
        "logprobs": True,
        "top_logprobs": min(session.settings.num_top, 20),
    }
    mode = session.settings.mode
    return body if mode is None else {**body, "logprobs_mode": mode}


def stream_entries(events: Iterable[Any]) -> list[Any]:
    """The entries of a chat stream, joined."""
    entries: list[Any] = []
    for event in events:
        for choice in of(event, "choices", list):
            logprobs = of(choice, "logprobs", dict, None) or {}
            entries += of(logprobs, "content", list, None) or []
    return entries


async def _raw_completion(session: Session) -> list[Finding]:
    """The four arrays as they are sent, without extensions."""
    prompt = (await session.prompts())[0]
    body = {
        "model": session.server.features.model,
        "prompt": prompt.text,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": 3,
    }
    reply = await session.server.post(openai_api.COMPLETIONS, body)
    choice = of(reply, "choices", list)[0]
    arrays = of(choice, "logprobs", dict)
    text, tokens = of(choice, "text", str), of(arrays, "tokens", list)
    offsets = of(arrays, "text_offset", list)
    found = []
    if len(offsets) != len(tokens):
        found.append(f"{len(offsets)} text_offset for {len(tokens)} tokens")
    if offsets != sorted(offsets):
        found.append(f"text_offset falls: {offsets}")
    if any(not isinstance(x, int) or not 0 <= x <= len(text) + len(prompt.text) for x in offsets):
        found.append(f"text_offset points out of the text: {offsets}")
    for i, (token, value, top) in enumerate(
        zip(
            tokens,
            of(arrays, "token_logprobs", list),
            of(arrays, "top_logprobs", list),
            strict=True,
        )
    ):
        if top.get(token) is None:
            found.append(f"token {i} {token!r} is not among its alternatives {top}")
        elif top[token] < value:
            found.append(f"token {i} {token!r}: {value} and, as an alternative, {top[token]}")
    return [Finding(f"completions, prompt {prompt}: {problem}") for problem in found]


def _entry_findings(what: str, entries: Sequence[Any]) -> Iterator[Finding]:
    """Bytes are bytes, or absent."""
    if not entries:
        yield Finding(f"{what}: logprobs.content has no entries")
    for index, entry in enumerate(entries):
        for one in (entry, *of(entry, "top_logprobs", list)):
            raw = one.get("bytes")
            fits = isinstance(raw, list) and all(isinstance(x, int) and 0 <= x < 256 for x in raw)
            if raw is not None and not fits:
                yield Finding(f"{what}, entry {index}: bytes are {raw!r}")


def records_findings(what: str, records: Sequence[TokenRecord], num_top: int) -> list[Finding]:
    """What no record of a distribution can say, whatever the model."""
    findings = []
    for index, record in enumerate(records):
        where = f"{what}, output token {index} ({record.key!r})"
        values = record.values
        if record.logprob is None:
            findings.append(Finding(f"{where}: null where a value was asked for"))
        bad = {key: x for key, x in values.items() if not math.isfinite(x) or x > _ABOVE}
        if bad:
            findings.append(Finding(f"{where}: no log-probabilities: {bad}"))
        total = sum(math.exp(min(x, 0.0)) for x in values.values() if x > FLOOR)
        if total > 1 + 1e-3:
            findings.append(Finding(f"{where}: probabilities add up to {total:.6g}"))
        if len(record.top) < num_top:
            said = f"{len(record.top)} alternatives of {num_top} asked for"
            findings.append(Finding(f"{where}: {said}"))
        vocab = uniform_over(record)
        if vocab is not None:
            message = f"{where}: every value is that of a uniform row of {vocab} tokens"
            findings.append(Finding(message, Fault.ZERO_ROW))
    return findings
