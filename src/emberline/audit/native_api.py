"""The native dialect (`POST /generate`): bodies of requests, and answers as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emberline.audit.openai_api import number, of
from emberline.audit.outcome import Malformed
from emberline.audit.records import Alternative, Answer, Ask, TokenRecord

Json = dict[str, Any]

GENERATE = "/generate"
_ROOT_OPTIONS = ("logprobs_mode", "speculate", "accept", "priority")
"""Options that are no sampling parameters and stand beside them."""


def body(ask: Ask, model: str | None, *, ignore_eos: bool) -> Json:
    """The body of a request. Without a `model` it names none, as this dialect's clients do."""
    sampling: Json = {"max_new_tokens": ask.max_tokens, "temperature": ask.temperature}
    optional = {
        "sampling_seed": ask.seed,
        "n": ask.n if ask.n > 1 else None,
        "ignore_eos": True if ask.ignore_eos and ignore_eos else None,
        **{name: value for name, value in ask.options.items() if name not in _ROOT_OPTIONS},
    }
    sampling |= {name: value for name, value in optional.items() if value is not None}
    sent: Json = {
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": ask.num_top,
        "logprob_start_len": 0 if ask.score_prompt else -1,
        **{name: value for name, value in ask.options.items() if name in _ROOT_OPTIONS},
    }
    if model is not None:
        sent["model"] = model
    if isinstance(ask.prompt, str):
        sent["text"] = ask.prompt
    else:
        sent["input_ids"] = list(ask.prompt)
    if ask.score_ids:
        sent["token_ids_logprob"] = list(ask.score_ids)
    if ask.mode is not None:
        sent["logprobs_mode"] = ask.mode
    if ask.stream:
        sent["stream"] = True
    return sent


def answers(reply: Any) -> list[Answer]:
    """The choices of an answer that was not streamed."""
    return [_answer(one, ()) for one in (reply if isinstance(reply, list) else [reply])]


def streamed(events: Sequence[Any]) -> list[Answer]:
    """The one choice of a stream. Events are cumulative, or carry what is new: both are read."""
    if not events:
        raise Malformed("a stream without events")
    meta: Json = {}
    sizes, total = [], 0
    text = ""
    for event in events:
        new = dict(of(event, "meta_info", dict))
        said = of(event, "text", str, "")
        text = said if said.startswith(text) else text + said
        for name in list(new):
            if name.startswith(("output_", "input_")) and name.endswith("logprobs"):
                new[name] = _grown(meta.get(name), new[name], new.get("completion_tokens"))
        meta |= {name: value for name, value in new.items() if value is not None}
        size = len(meta.get("output_token_logprobs") or ())
        if size > total:
            sizes.append(size - total)
            total = size
    return [_answer({"text": text, "meta_info": meta}, tuple(sizes))]


def _grown(before: list[Any] | None, now: list[Any] | None, total: Any) -> list[Any] | None:
    """A list after an event: the event's own if it has everything, else both together."""
    if not before or now is None or len(now) == total or now[: len(before)] == before:
        return now if now is not None else before
    return before + now


def _answer(reply: Any, events: tuple[int, ...]) -> Answer:
    meta = of(reply, "meta_info", dict)
    ending = meta.get("finish_reason")
    reason = ending.get("type") if isinstance(ending, Mapping) else ending
    return Answer(
        text=of(reply, "text", str, ""),
        records=_records(meta, "output"),
        finish_reason=reason,
        completion_tokens=meta.get("completion_tokens"),
        prompt_tokens=meta.get("prompt_tokens"),
        cached_tokens=meta.get("cached_tokens"),
        prompt=_records(meta, "input"),
        events=events,
    )


def _records(meta: Mapping[str, Any], side: str) -> tuple[TokenRecord, ...]:
    """The records of `input_*` or `output_*`."""
    tokens = of(meta, f"{side}_token_logprobs", list, None) or []
    tops = of(meta, f"{side}_top_logprobs", list, None) or [None] * len(tokens)
    chosen = of(meta, f"{side}_token_ids_logprobs", list, None) or [None] * len(tokens)
    if not len(tokens) == len(tops) == len(chosen):
        raise Malformed(
            f"{side}_token_logprobs has {len(tokens)} entries, {side}_top_logprobs {len(tops)}, "
            f"{side}_token_ids_logprobs {len(chosen)}"
        )
    return tuple(
        TokenRecord(
            _id(entry, side),
            None if entry[0] is None else number(entry[0]),
            tuple(Alternative(_id(one, side), number(one[0])) for one in top or ()),
            {_id(one, side): number(one[0]) for one in scored or ()},
        )
        for entry, top, scored in zip(tokens, tops, chosen, strict=True)
    )


def _id(entry: Any, side: str) -> int:
    """The token id of a (logprob, token id, text) triple."""
    if isinstance(entry, list) and len(entry) >= 2 and isinstance(entry[1], int):
        return entry[1]
    raise Malformed(f"{side} log-probabilities should be [value, id, text], got {entry!r}")
