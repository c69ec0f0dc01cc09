"""OpenAI's dialect: bodies of requests, and answers as records. No connection is opened here.

`ids` says whether the server names tokens `token_id:N` when asked to (vLLM's
`return_tokens_as_token_ids`): only then are tokens known by their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emberline.audit.outcome import Malformed
from emberline.audit.records import Alternative, Answer, Ask, Key, TokenRecord

Json = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_ID = "token_id:"


def body(ask: Ask, model: str, *, ids: bool, ignore_eos: bool) -> Json:
    """The body of a completion."""
    sent: Json = {
        "model": model,
        "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "logprobs": ask.num_top,
    }
    optional: Json = {
        "seed": ask.seed,
        "n": ask.n if ask.n > 1 else None,
        "echo": True if ask.score_prompt else None,
        "logprob_token_ids": list(ask.score_ids) or None,
        "logprobs_mode": ask.mode,
        "return_tokens_as_token_ids": True if ids else None,
        "ignore_eos": True if ask.ignore_eos and ignore_eos else None,
        "stream": True if ask.stream else None,
        "stream_options": {"include_usage": True} if ask.stream else None,
        **ask.options,
    }
    return sent | {name: value for name, value in optional.items() if value is not None}


def answers(ask: Ask, reply: Any) -> list[Answer]:
    """The choices of an answer that was not streamed, by index."""
    usage = of(reply, "usage", dict, None)
    choices = sorted(of(reply, "choices", list), key=lambda choice: of(choice, "index", int))
    return [_answer(ask, [choice], usage) for choice in choices]


def streamed(ask: Ask, events: Sequence[Any]) -> list[Answer]:
    """The choices of a stream, by index."""
    usage = None
    parts: dict[int, list[Json]] = {}
    for event in events:
        usage = of(event, "usage", dict, None) or usage
        for choice in of(event, "choices", list):
            parts.setdefault(of(choice, "index", int), []).append(choice)
    return [_answer(ask, parts[index], usage) for index in sorted(parts)]


def _answer(ask: Ask, parts: Sequence[Json], usage: Json | None) -> Answer:
    """One choice from its parts: one of an answer, many of a stream."""
    records: list[TokenRecord] = []
    events = []
    for part in parts:
        arrays = of(part, "logprobs", dict, None)
        added = completion_records(arrays) if arrays else []
        records += added
        if added:
            events.append(len(added))
    counts = usage or {}
    num_prompt = counts.get("prompt_tokens")
    prompt: tuple[TokenRecord, ...] = ()
    if ask.score_prompt:
        split = num_prompt if isinstance(ask.prompt, str) else len(ask.prompt)
        if not isinstance(split, int):
            raise Malformed("usage.prompt_tokens is absent: where an echoed prompt ends is unknown")
        prompt, records = tuple(records[:split]), records[split:]
    endings = [part.get("finish_reason") for part in parts if part.get("finish_reason")]
    details = counts.get("prompt_tokens_details") or {}
    return Answer(
        text="".join(of(part, "text", str) for part in parts),
        records=tuple(records),
        finish_reason=endings[-1] if endings else None,
        completion_tokens=counts.get("completion_tokens"),
        prompt_tokens=num_prompt,
        cached_tokens=details.get("cached_tokens"),
        prompt=prompt,
        events=tuple(events) if ask.stream else (),
    )


def completion_records(arrays: Mapping[str, Any]) -> list[TokenRecord]:
    """The records of completions' parallel arrays."""
    tokens = of(arrays, "tokens", list)
    values = of(arrays, "token_logprobs", list)
    tops = of(arrays, "top_logprobs", list, None) or [None] * len(tokens)
    chosen = of(arrays, "token_id_logprobs", list, None) or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops) == len(chosen):
        lengths = f"{len(tokens)} tokens, {len(values)} token_logprobs, {len(tops)} top_logprobs"
        raise Malformed(f"logprobs: arrays of unequal length: {lengths}")
    records = []
    for token, value, top, scored in zip(tokens, values, tops, chosen, strict=True):
        listed = [Alternative(key_of(name), number(x)) for name, x in (top or {}).items()]
        by_id = {int(name): number(x) for name, x in (scored or {}).items()}
        if not by_id:  # vLLM puts the ids that were asked for among the alternatives
            by_id = {one.key: one.logprob for one in listed if isinstance(one.key, int)}
        listed.sort(key=lambda one: -one.logprob)
        records.append(
            TokenRecord(
                key_of(token), None if value is None else number(value), tuple(listed), by_id
            )
        )
    return records


def chat_records(entries: Sequence[Any]) -> list[TokenRecord]:
    """The records of chat's `logprobs.content`, alternatives in the server's order."""
    return [
        TokenRecord(
            of(entry, "token", str),
            number(of(entry, "logprob", (int, float))),
            tuple(
                Alternative(of(one, "token", str), number(of(one, "logprob", (int, float))))
                for one in of(entry, "top_logprobs", list)
            ),
        )
        for entry in entries
    ]


def key_of(token: Any) -> Key:
    """`token_id:N` as the id, anything else as the text it is."""
    if not isinstance(token, str):
        raise Malformed(f"logprobs.tokens holds {token!r}, which is no text")
    number_part = token.removeprefix(_ID)
    return int(number_part) if number_part != token and number_part.isdigit() else token


def number(value: Any) -> float:
    """A log-probability."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"a log-probability is {value!r}, which is no number")
    return float(value)


_REQUIRED = object()


def of(parent: Any, name: str, kind: Any, absent: Any = _REQUIRED) -> Any:
    """Field `name` of an object, of type `kind`; `absent` where it may be missing or null."""
    value = parent.get(name) if isinstance(parent, Mapping) else None
    if value is None and absent is not _REQUIRED:
        return absent
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        named = getattr(kind, "__name__", "number")
        raise Malformed(f"{name} should be a {named}, got {str(value)[:80]}")
    return value
