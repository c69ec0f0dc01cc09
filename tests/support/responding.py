"""Calls of `POST /v1/responses`: answers and events, valid in the official client's types."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.serving import Server, strict

URL = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def respond(server: Server, given: object, **options: object) -> dict[str, Any]:
    """A whole answer."""
    answer = server.post(URL, {"input": given, "temperature": 0, **options})
    assert answer.status_code == 200, answer.text
    Response.model_validate_json(answer.content)
    return strict(answer.content)


def refusal(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a call that cannot be answered."""
    answer = server.post(URL, {"input": "x", **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def stream(server: Server, given: object, **options: object) -> list[dict[str, Any]]:
    """The events of an answer."""
    answer = server.post(URL, {"input": given, "temperature": 0, "stream": True, **options})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parse(answer.text)


def parse(text: str) -> list[dict[str, Any]]:
    """Events, numbered, each named by its type; `[DONE]` checked and dropped."""
    *frames, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = strict(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        _EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one type."""
    return [event for event in events if event["type"] == f"response.{kind}"]


def bare(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without bytes, at every level."""
    return [
        {
            key: bare(value) if key == "top_logprobs" else value
            for key, value in entry.items()
            if key != "bytes"
        }
        for entry in entries
    ]


def timeless(response: dict[str, Any]) -> dict[str, Any]:
    """What two equal calls share."""
    own = ("id", "created_at", "completed_at", "usage")
    shared = {key: value for key, value in response.items() if key not in own}
    shared["output"] = [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in response["output"]
    ]
    details = response["usage"]["output_tokens_details"]
    return shared | {"tokens": response["usage"]["output_tokens"], "details": details}
