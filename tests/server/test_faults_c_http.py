"""What others do meanwhile changes no answer, over HTTP: faults by their numbers in faults.md."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.serving import Server, say, saying_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DRAFTS = [(0, 0), (3, 2), (7, 5)]  # drafts a block, one wrong at so many positions


@pytest.fixture(scope="module", params=DRAFTS, ids=str)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    num_drafts, wrong_every = request.param
    with saying_server(num_drafts=num_drafts, wrong_every=wrong_every, num_pages=600) as running:
        yield running
        running.alive()


def test_identifiers_are_copied_to_the_letter(server: Server) -> None:
    """C04: the target copies them out of its KV; side by side, of many lengths."""
    dice = random.Random(4)
    names = [f"{dice.getrandbits(4 * length):0{length}x}" for length in range(4, 60, 4)]

    def copied(name: str) -> str:
        return str(server.complete(say(name), max_tokens=70)["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(copied, names)) == names


def test_sessions_side_by_side_never_meet(server: Server) -> None:
    """C05: six users of four turns each; every answer is of its own session, and as if alone."""

    def session(user: int) -> list[str]:
        messages: list[dict[str, Any]] = []
        texts = []
        for turn in range(4):
            word = f"u{user}t{turn} " * (1 + user % 2)
            messages.append({"role": "user", "content": say(word) if turn % 2 else "free"})
            body = {"messages": messages, "temperature": 0, "max_tokens": 12}
            answer = server.post(CHAT, body).json()
            text = str(answer["choices"][0]["message"]["content"])
            assert text == word or not turn % 2
            texts.append(text)
            messages.append({"role": "assistant", "content": "ok"})
        return texts

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(session, range(6)))
    assert [session(user) for user in range(6)] == together


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "name",
    ["custom_logit_processor", "logits_processors", "thinking_token_budget", "thinking_budget"],
)
def test_what_would_draw_by_rules_of_its_own_is_refused(
    server: Server, path: str, name: str
) -> None:
    """C20."""
    body: dict[str, Any] = {"prompt": "x"}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "x"}]}
    answer = server.post(path, {**body, name: 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
