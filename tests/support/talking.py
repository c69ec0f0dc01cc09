"""Servers whose template knows tools and reasoning, over a target that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from support.serving import Server, make_tokenizer, saying_server

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_MESSAGES = (
    "{% for m in messages %}<{{ 'user' if m.role == 'tool' else m.role }}>"
    "{{ m.content or '' }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}{% endfor %}"
)
HERMES = (
    "{% if tools %}<system>Call so: <tool_call>"
    '{"name": ..., "arguments": ...}</tool_call>'
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}{% endif %}"
    f"{_MESSAGES}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA = HERMES.replace("<tool_call>", "").replace("</tool_call>", "")
LLAMA = LLAMA.replace('"arguments": .', '"parameters": .')
# The model decides, unless it is told not to think.
MAYBE_THINKS = HERMES.replace(
    "<assistant>{% endif %}",
    "<assistant>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
THINKS = HERMES.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}").replace(
    "</tool_call>", "</tool_call>{# </think> #}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PARIS = '{"city": "Paris"}'


def called(name: str = "get_weather", arguments: str = PARIS) -> str:
    """A call as the Hermes style writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@contextmanager
def talking_server(template: str, *, marked: bool = True, **settings: Any) -> Iterator[Server]:
    """A server of that template; `marked`: its markers are tokens, not text."""
    tokenizer = make_tokenizer(template, MARKERS if marked else ())
    with saying_server(tokenizer=tokenizer, max_model_len=1024, **settings) as server:
        yield server


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The choice that the events of a stream add up to, in the shape of one that is whole."""
    message: dict[str, Any] = {"role": None, "content": ""}
    entries: list[Any] = []
    token_ids: list[int] = []
    finish = None
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] == 0
            delta = choice["delta"]
            message["role"] = message["role"] or delta.get("role")
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            for part in delta.get("tool_calls", ()):
                _add_call(message.setdefault("tool_calls", []), part)
            entries += (choice["logprobs"] or {}).get("content", ())
            token_ids += choice.get("token_ids", ())
            finish = choice["finish_reason"] or finish
    return {"message": message, "entries": entries, "token_ids": token_ids, "finish": finish}


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    if part["index"] == len(calls):
        assert part["type"] == "function"
        calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
    else:
        assert part["index"] == len(calls) - 1
        assert set(part) == {"index", "function"}
    calls[-1]["arguments"] += part["function"]["arguments"]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and arguments of a whole choice's calls."""
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def arguments_of(choice: dict[str, Any]) -> list[Any]:
    """The arguments of a choice's calls, parsed."""
    return [json.loads(arguments) for _, arguments in calls_of(choice)]
