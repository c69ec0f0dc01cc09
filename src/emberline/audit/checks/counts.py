"""Counts: records, usage and text end at one token, wherever that is inside a block."""

from __future__ import annotations

from dataclasses import replace

from emberline.audit import openai_api
from emberline.audit.checks.shapes import chat_body, stream_entries
from emberline.audit.compare import reproduce
from emberline.audit.openai_api import of
from emberline.audit.outcome import Fault, Finding, NotSupported, Outcome, judged
from emberline.audit.records import Answer, Ask
from emberline.audit.session import Prompt, Session


async def counts(session: Session) -> Outcome:
    """Token limits 1 .. K + 2, stop ids and stop strings inside blocks, the model's own end."""
    findings: list[Finding] = []
    prompt = (await session.prompts())[1]
    length = session.block + 2
    endless = session.server.features.ignore_eos
    whole = session.ask(prompt, max_tokens=length + 4, ignore_eos=endless)
    long = await session.server.ask(whole)
    limits = [(f"max_tokens {n}", replace(whole, max_tokens=n)) for n in range(1, length + 1)]
    groups = [limits, _stop_strings(long, whole, length), _stop_ids(long, whole, length)]
    num_ends, lacks = 0, ""
    for group in groups:
        ends = [(what, replace(a, stream=stream)) for what, a in group for stream in (False, True)]
        try:
            answers = await session.together([ask for _, ask in ends])
        except NotSupported as problem:
            if group is limits:
                raise
            lacks += f"; without {ends[0][0]}: {problem}"
            continue
        num_ends += len(ends)
        for (what, ask), answer in zip(ends, answers, strict=True):
            named = what + (", streamed" if ask.stream else "")
            findings += _judge(named, prompt, ask, answer, long)
    if session.server.features.openai:
        try:
            findings += await _own_end(session)
            num_ends += 2
        except NotSupported as problem:
            lacks += f"; without chat: {problem}"
    return judged(findings, f"{num_ends} ends{lacks}", ends=num_ends)


def _stop_ids(long: Answer, whole: Ask, length: int) -> list[tuple[str, Ask]]:
    """A stop at the first time each token of the answer comes."""
    asks = []
    for index, key in enumerate(long.keys[:length]):
        if index and isinstance(key, int) and key not in long.keys[:index]:
            options = {"stop_token_ids": [key]}
            ask = replace(whole, options=options, ignore_eos=False)
            asks.append((f"stop id {key} (output token {index})", ask))
    return asks[: max(3, length // 2)]


def _stop_strings(long: Answer, whole: Ask, length: int) -> list[tuple[str, Ask]]:
    """Pieces of the text, where they come first."""
    text, asks = long.text, []
    for start in range(1, len(text) - 3, max(1, len(text) // length)):
        piece = text[start : start + 3]
        whole_characters = piece.isprintable() and "\ufffd" not in piece
        if piece.strip() and whole_characters and text.find(piece) == start:
            asks.append((f"stop {piece!r}", replace(whole, options={"stop": [piece]})))
    return asks[: max(3, length // 2)]


async def _own_end(session: Session) -> list[Finding]:
    """A chat that the model ends itself: records and usage, streamed and not."""
    body = {**chat_body(session), "max_tokens": 96, "top_logprobs": 1}
    reply = await session.server.post(openai_api.CHAT, body)
    choice = of(reply, "choices", list)[0]
    entries = of(of(choice, "logprobs", dict), "content", list)
    counted = {"chat": (len(entries), of(of(reply, "usage", dict), "completion_tokens", int))}
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = await session.server.events(openai_api.CHAT, asked)
    usages = [usage for event in events if (usage := of(event, "usage", dict, None))]
    said = of(usages[-1] if usages else {}, "completion_tokens", int)
    counted["chat, streamed"] = (len(stream_entries(events)), said)
    return [
        Finding(
            f"{what}, {body['messages']}: {count} records, usage says {said} tokens",
            Fault.PAST_STOP if count > said else None,
        )
        for what, (count, said) in counted.items()
        if count != said
    ]


def _judge(what: str, prompt: Prompt, ask: Ask, answer: Answer, long: Answer) -> list[Finding]:
    """What is wrong with where an answer ends."""
    where = f"prompt {prompt}, {what}"
    count, said = len(answer.records), answer.completion_tokens
    again = reproduce(ask, answer, count - 1)
    if said is None:
        return [Finding(f"{where}: no count of completion tokens in usage", None, again)]
    stop_ids = ask.options.get("stop_token_ids") or ()
    passed = next((i for i, key in enumerate(answer.keys) if key in stop_ids), count)
    if count > said or passed < count - 1:
        kept = min(said, passed + 1)
        message = f"{where}: {count} records, the answer has {kept} tokens (usage says {said})"
        return [Finding(message, Fault.PAST_STOP, again)]
    if count < said:
        return [Finding(f"{where}: {count} records, usage says {said} tokens", None, again)]
    found = []
    reason = answer.finish_reason
    if count > ask.max_tokens:
        found.append(f"{count} tokens, at most {ask.max_tokens} were asked for")
    if not ask.options and (count, reason) != (ask.max_tokens, "length") and ask.ignore_eos:
        found.append(f"{count} tokens, finish_reason {reason!r}")
    if ask.options and reason != "stop":
        found.append(f"finish_reason {reason!r} at a stop")
    for stop in ask.options.get("stop") or ():
        expected = long.text[: long.text.find(stop)]
        if answer.keys == long.keys[:count] and answer.text != expected:
            found.append(f"the text is {answer.text!r}, up to the stop it is {expected!r}")
    return [Finding(f"{where}: {problem}", None, again) for problem in found]
