"""Many at once, little memory, cancels and priorities: all answers are what they would be alone."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_disconnect import send
from test_model_logprobs import GOLDEN, SETTINGS, make_folder, serving

from support.serving import Server, saying_server

COMPLETIONS = "/v1/completions"


def ask(server: Server, body: dict[str, Any]) -> Any:
    answer = server.post(COMPLETIONS, {"ignore_eos": True, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def ask_together(server: Server, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(server, body), bodies))


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(10, 260), k=count)


@pytest.fixture(scope="module", params=[0, 5])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(num_drafts=request.param, wrong_every=3, max_num_reqs=2) as running:
        yield running
        running.alive()


def test_a_burst_that_must_wait(server: Server) -> None:
    """D35: forty prompts catch up two at a time."""
    bodies = [{"prompt": ids(i, 5 + i), "max_tokens": 6, "logprobs": 1} for i in range(40)]
    alone = [ask(server, body) for body in bodies]
    assert ask_together(server, bodies) == alone


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_too_little_memory_for_two(num_drafts: int) -> None:
    """C36, C38: eight with mixed priorities in the pages of one and a half; drafts are dropped."""
    with saying_server(
        num_drafts=num_drafts, wrong_every=3, num_pages=36, max_num_reqs=4
    ) as server:
        bodies = [
            {"prompt": ids(i, 30), "max_tokens": 60, "priority": i % 3 - 1, "seed": i,
             "temperature": i % 2, "logprobs": 2}
            for i in range(8)
        ]  # fmt: skip
        alone = [ask(server, body) for body in bodies]
        assert ask_together(server, bodies) == alone
        assert ask_together(server, bodies[::-1]) == alone[::-1]
        assert server.engine.snapshot().num_preemptions > 0
        server.alive()


@pytest.mark.parametrize("shared", [3, 4, 8, 13, 31])
def test_a_prompt_after_another_that_shares_its_beginning(server: Server, shared: int) -> None:
    """C41: A, B, A with the prefix cache: the third answer is the first."""
    first = {"prompt": ids(shared, 40), "max_tokens": 20, "logprobs": 2}
    second = {**first, "prompt": [*first["prompt"][:shared], *ids(99, 40 - shared)]}
    answer = ask(server, first)
    ask(server, second)
    assert ask(server, first) == answer


def test_cancels_and_retries_of_a_shared_prefix(server: Server) -> None:
    """C39: they come and go within milliseconds; the others' answers are their own."""
    dice, prefix = random.Random(39), ids(39, 8)
    bodies = [{"prompt": [*prefix, *ids(i, 6)], "max_tokens": 12} for i in range(12)]
    alone = [ask(server, body) for body in bodies]
    for _ in range(5):
        with ThreadPoolExecutor(12) as pool:
            left: list[socket.socket] = []
            asked = {}
            for i in dice.sample(range(12), 12):
                if i % 3:
                    asked[i] = pool.submit(ask, server, bodies[i])
                else:
                    body = {**bodies[i], "max_tokens": 100, "stream": bool(i % 2)}
                    left.append(send(server, COMPLETIONS, {**body, "ignore_eos": True}))
                    if dice.random() < 0.5:
                        left.pop(0).close()
                    asked[i] = pool.submit(ask, server, bodies[i])  # the retry
            for connection in left:
                connection.close()
            for i, answer in asked.items():
                assert answer.result(30) == alone[i]
    server.alive()


@pytest.mark.parametrize("num_drafts", [1, 8, 16, 32])
@pytest.mark.parametrize("max_num_reqs", [1, 3, 8])
def test_blocks_of_any_length_for_any_number(num_drafts: int, max_num_reqs: int) -> None:
    """D38: K + 1 rows for every request at the same time."""
    with saying_server(num_drafts=num_drafts, max_num_reqs=max_num_reqs) as server:
        bodies = [{"prompt": ids(i, 4), "max_tokens": 40} for i in range(max_num_reqs)]
        answers = ask_together(server, bodies)
        assert {choice["finish_reason"] for [choice] in answers} == {"length"}
        assert answers == [ask(server, body) for body in bodies]
        server.alive()


def test_scored_prompts_that_are_left_half_way() -> None:
    """D19: cut between two chunks of a scored prompt; every id that is reported exists."""
    with saying_server(num_drafts=4, prefill_chunk=16, delay=0.02) as server:
        body = {"prompt": ids(1, 100), "max_tokens": 2, "prompt_logprobs": 5}
        for i in range(5):
            connection = send(server, COMPLETIONS, {**body, "prompt": ids(i, 100), "stream": True})
            server.until(lambda state: state.num_running == 1)
            connection.close()
        [choice] = ask(server, body)
        assert len(choice["prompt_logprobs"]) == 100
        reported = [int(key) for entry in choice["prompt_logprobs"][1:] for key in entry]
        assert set(reported) <= set(range(server.engine.vocab_size))
        server.alive()


def test_scored_prompts_take_bounded_rows() -> None:
    """D16: many long ones at once; the logits of a step stay few."""
    with saying_server(max_num_reqs=8) as server:
        bodies = [{"prompt": ids(i, 200), "max_tokens": 1, "prompt_logprobs": 1} for i in range(16)]
        for [choice] in ask_together(server, bodies):
            assert len(choice["prompt_logprobs"]) == 200
        assert server.target is not None
        assert max(server.target.num_scored_run) <= 128 + 8
        server.alive()


def test_a_draft_that_was_trained_on_a_shorter_context(tmp_path: Path) -> None:
    """D28: its KV lies in the target's pages, so that it has no limit of its own to run over."""
    torch.set_num_threads(1)
    folder, draft = make_folder(tmp_path / "target"), tmp_path / "draft"
    shutil.copytree(GOLDEN / "vanilla", draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    bodies = [{"prompt": "x" * count, "max_tokens": 30} for count in (20, 60, 100)]
    with serving(folder, "none") as plain:
        expected = [ask(plain, body) for body in bodies]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, str(draft), {})
        with serving(folder, str(draft)) as server:
            assert [ask(server, body) for body in bodies] == expected
            assert server.engine.snapshot().num_draft_tokens > 0
            server.rest()
