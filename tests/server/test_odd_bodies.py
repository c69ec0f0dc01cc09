"""Whatever the body, the answer is an answer or a refusal: never a 500, never a hung server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberline.server.chat_body import ChatBody
from emberline.server.protocol import CompletionBody
from emberline.server.responses_body import ResponsesBody
from emberline.server.tokens_body import TokenizeBody

from support.serving import Server, saying_server, strict

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, -(2**70), 0.0, 0.5, 1.0, 1e-300, 1e308,
    "", "x", "\x00", "🙂", "\ud7ff", "a" * 3000, [], [0], [[]], [[0]], [0.5], [None], ["x", None],
    {}, {"0": 1}, {"0": None}, {"x": {}}, [{}], [{"role": "user"}],
    [{"role": "user", "content": []}],
    [{"type": "reasoning"}], [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}], {"format": {}},
    [{"type": "function_call_output", "call_id": "c", "output": []}], {"effort": "low"},
    [{"role": "user", "content": "\x00<say>"}], [{"role": "system", "content": "s"}] * 3,
    {"include_usage": True}, {"add_generation_prompt": True}, {"messages": [], "suffix": 1},
    list(range(269, 250, -1)), ["raw"], "raw", "processed", "coupled", "rejection",
]  # fmt: skip
PATHS = {
    "/v1/completions": (CompletionBody, {"prompt": "abc", "max_tokens": 3}),
    "/v1/chat/completions": (
        ChatBody,
        {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
    ),
    "/v1/responses": (ResponsesBody, {"input": "abc", "max_output_tokens": 3}),
    "/tokenize": (TokenizeBody, {"prompt": "abc"}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with saying_server(num_drafts=3, wrong_every=4, max_model_len=64, max_queue=8) as running:
        yield running
        running.alive()


@pytest.mark.parametrize("path", list(PATHS))
@given(data=st.data())
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_an_odd_body_is_answered_or_refused(server: Server, path: str, data: st.DataObject) -> None:
    kind, base = PATHS[path]
    names = st.sampled_from([*kind.model_fields, "tools", "unheard_of"])
    changes = data.draw(st.dictionaries(names, st.sampled_from(ODD), max_size=4))
    answer = server.post(path, {**base, **changes})
    assert answer.status_code in (200, 400, 404, 429), (changes, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        parts = [part for part in answer.text.split("\n\n") if part]
        events = [part.split("\n")[-1].removeprefix("data: ") for part in parts]
        assert events[-1] == "[DONE]"
        assert all("error" not in strict(event) for event in events[:-1]), changes
        assert "response.failed" not in answer.text, changes
    elif answer.status_code != 200:
        assert strict(answer.content)["error"]["message"]
    else:
        strict(answer.content)
