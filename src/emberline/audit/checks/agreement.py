"""Agreement of a server with itself: streamed, beside others, seeded, cached, without drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from emberline.audit import openai_api
from emberline.audit.checks.shapes import chat_body, stream_entries
from emberline.audit.compare import compare, reproduce
from emberline.audit.openai_api import of
from emberline.audit.outcome import Fault, Finding, NotSupported, Outcome, judged, skipped
from emberline.audit.records import Answer, Ask
from emberline.audit.session import Session

_MIXED: tuple[tuple[float, Mapping[str, Any]], ...] = (
    (0.0, {}),
    (1.0, {}),
    (0.0, {"frequency_penalty": 1.0}),
    (0.7, {}),
    (0.0, {"presence_penalty": 0.5}),
    (1.3, {"top_p": 0.9}),
    (0.0, {}),
    (0.5, {}),
)


async def streaming(session: Session) -> Outcome:
    """Entry by entry, alternatives included; chat too where it is spoken."""
    findings: list[Finding] = []
    count = 0
    prompts = await session.prompts()
    asks = [session.ask(prompt) for prompt in prompts]
    wholes = await session.together(asks)
    streams = await session.together([replace(ask, stream=True) for ask in asks])
    for prompt, ask, whole, stream in zip(prompts, asks, wholes, streams, strict=True):
        what = f"prompt {prompt}"
        findings += _streamed(session, what, ask, whole, stream)
        if whole.text != stream.text and whole.keys == stream.keys:
            texts = f"{whole.text!r}, streamed {stream.text!r}"
            findings.append(Finding(f"{what}: the text is {texts}"))
        count += len(stream.records)
    note = f"{count} tokens"
    if session.server.features.openai:
        try:
            findings += await _chat(session)
        except NotSupported as problem:
            note += f"; without chat: {problem}"
    return judged(findings, note, tokens=count)


async def _chat(session: Session) -> list[Finding]:
    body = chat_body(session)
    reply = await session.server.post(openai_api.CHAT, body)
    entries = of(of(of(reply, "choices", list)[0], "logprobs", dict), "content", list)
    events = await session.server.events(openai_api.CHAT, {**body, "stream": True})
    sizes = [len(stream_entries([event])) for event in events]
    whole = Answer(text="", records=tuple(openai_api.chat_records(entries)))
    stream = Answer(
        text="",
        records=tuple(openai_api.chat_records(stream_entries(events))),
        events=tuple(size for size in sizes if size),
    )
    ask = Ask(prompt=str(body["messages"]), max_tokens=session.settings.num_tokens)
    return _streamed(session, f"chat {body['messages']}", ask, whole, stream)


def _streamed(
    session: Session, what: str, ask: Ask, whole: Answer, stream: Answer
) -> list[Finding]:
    """Where a stream differs, and whether an event repeats the alternatives of its first entry."""
    found = compare(what, ask, whole, stream, session.noise, ("whole", "streamed")).findings
    repeated = []
    for index, (a, b) in enumerate(zip(whole.records, stream.records, strict=False)):
        first = stream.begins_event(index)
        # Completions list the chosen token among its alternatives: its own entry is not repeated.
        listed = {(one.key, one.logprob) for one in b.top if one.key != b.key}
        same = index > first and listed and listed <= set(stream.records[first].values.items())
        if a.key == b.key and same and a.top != b.top:
            message = (
                f"{what}, output token {index} ({b.key!r}): the alternatives are those of token "
                f"{first} in the same event: {list(b.top[:3])}, not {list(a.top[:3])}"
            )
            repeated.append(Finding(message, Fault.REPEATED, reproduce(ask, stream, index)))
    return repeated or list(found)


async def batch(session: Session) -> Outcome:
    """Requests of mixed options one at a time, then all at once."""
    draws = await session.seeds_hold()
    asks = [
        session.ask(
            prompt,
            temperature=temperature,
            seed=session.settings.seed + number,
            num_top=max(2, session.settings.num_top - number % 3),
            options=options,
        )
        for number, (prompt, (temperature, options)) in enumerate(
            zip(await session.prompts(len(_MIXED)), _MIXED, strict=True)
        )
        if temperature == 0 or draws
    ]
    alone = [await session.server.ask(ask) for ask in asks]
    together = await session.together(asks)
    findings: list[Finding] = []
    largest, ties, parted = 0.0, 0, 0
    for number, (ask, one, two) in enumerate(zip(asks, alone, together, strict=True)):
        what = f"request {number} of {len(asks)} ({ask.shown()})"
        result = compare(what, ask, one, two, session.noise, ("alone", "beside others"))
        largest, ties = max(largest, result.largest), ties + result.near_tie
        if ask.temperature > 0 and not session.noise.tells_draws() and one.keys != two.keys:
            parted += 1  # noise of this size moves draws, and what follows is another text
        else:
            findings += result.findings
    note = f"{len(asks)} requests, max {largest:.3g}, {ties} near ties"
    if parted:
        note += f", {parted} drawn answers parted as noise of this dtype may make them"
    if not draws:
        note += "; greedy only, as seeds do not hold"
    return judged(findings, note, max=largest, near_ties=ties)


async def seeds(session: Session) -> Outcome:
    """One seed one answer: twice, streamed, beside others. Other seeds, other answers."""
    prompt = (await session.prompts())[1]
    ask = session.ask(prompt, temperature=1.0, seed=session.settings.seed + 1)
    first = await session.server.ask(ask)
    others = [replace(ask, seed=session.settings.seed + 2 + i) for i in range(7)]
    beside, *rest = await session.together([ask, *others])
    answers = {
        "again": await session.server.ask(ask),
        "streamed": await session.server.ask(replace(ask, stream=True)),
        "beside others": beside,
    }
    findings: list[Finding] = []
    parted = False
    for name, answer in answers.items():
        if answer.keys == first.keys:
            continue
        if answer is beside and not session.noise.tells_draws():
            parted = True  # noise of this size moves draws; alone the same sums are done again
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(first.keys, answer.keys, strict=False)) if a != b),
            min(len(first.keys), len(answer.keys)),
        )
        message = (
            f"prompt {prompt}, temperature 1, seed {ask.seed}, {name}: output token {at} is "
            f"{answer.keys[at : at + 1]}, first {first.keys[at : at + 1]}"
        )
        findings.append(Finding(message, None, reproduce(ask, first, at)))
    if len({answer.keys for answer in (first, *rest)}) == 1:
        findings.append(Finding(f"prompt {prompt}: {1 + len(rest)} seeds give one answer"))
    note = f"{len(answers)} repetitions, {len(rest)} other seeds"
    if parted:
        note += ", beside others it parted as noise of this dtype may make it"
    return judged(findings, note)


async def cached_prefix(session: Session) -> Outcome:
    """A prompt twice, then once more after another that shares its first half."""
    prompts = await session.known_prompts(8)
    # In an order that no other check has sent, so that the first time is the first.
    ids = sum((prompt.ids for prompt in prompts[::-1]), ())[:96]
    half = ids[: len(ids) // 2] + ids[len(ids) // 2 :][::-1]
    ask = session.ask(ids)
    cold = await session.server.ask(ask)
    again = await session.server.ask(ask)
    await session.server.ask(session.ask(half))
    later = await session.server.ask(ask)
    findings: list[Finding] = []
    largest = 0.0
    for name, answer in (("again", again), ("after another", later)):
        what = f"prompt of {len(ids)} ids, {name}"
        result = compare(what, ask, cold, answer, session.noise, ("first", name))
        findings += result.findings
        largest = max(largest, result.largest)
    cached = [answer.cached_tokens for answer in (cold, again, later)]
    note = f"prompt of {len(ids)} ids, max {largest:.3g}, cached tokens {cached}"
    return judged(findings, note, max=largest, cached_tokens=cached)


async def speculation_off(session: Session) -> Outcome:
    """Greedy answers with drafts and, on the same server, without."""
    await session.needs("speculate", False, "no")
    return await _greedy(session, {"speculate": False}, "drafts", "no drafts")


async def compare_servers(session: Session) -> Outcome:
    """Greedy answers of two servers; where they part, the margin tells a near tie."""
    if session.other is None:
        return skipped("no --compare was given")
    return await _greedy(session, {}, session.server.url, session.other.url)


async def _greedy(
    session: Session, options: Mapping[str, Any], one_name: str, two_name: str
) -> Outcome:
    server = session.other if not options and session.other is not None else session.server
    findings: list[Finding] = []
    largest, ties, count = 0.0, 0, 0
    prompts = await session.prompts()
    asks = [session.ask(prompt) for prompt in prompts]
    ones = await session.together(asks)
    twos = await session.together([replace(ask, options=options) for ask in asks], server)
    for prompt, ask, one, two in zip(prompts, asks, ones, twos, strict=True):
        what = f"prompt {prompt}"
        result = compare(what, ask, one, two, session.noise, (one_name, two_name))
        findings += result.findings
        largest, ties = max(largest, result.largest), ties + result.near_tie
        count += result.num_compared
    note = f"{count} greedy tokens, max {largest:.3g}, {ties} near ties"
    return judged(findings, note, tokens=count, max=largest, near_ties=ties)
