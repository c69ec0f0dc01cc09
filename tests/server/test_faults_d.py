"""Bad requests beside good ones, over HTTP: faults by their numbers in docs/faults.md."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.serving import Server, saying_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
V = 270  # the served vocabulary, padding included
BAD: list[tuple[str, dict[str, Any]]] = [
    ("stop_token_ids", {"stop_token_ids": [V + 5], "min_tokens": 4}),
    ("stop_token_ids[0]", {"stop_token_ids": [-1], "min_tokens": 4}),
    ("logit_bias", {"logit_bias": {str(V): 5}}),
    ("logit_bias", {"logit_bias": {"-1": 5}}),
    ("prompt", {"prompt": [V]}),
    ("prompt", {"prompt": [2**31]}),
    ("logprobs", {"logprobs": 10**7}),
    ("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [V]}),
    ("allowed_token_ids", {"allowed_token_ids": [V]}),
    ("n", {"n": 10**7}),
    ("guided_regex", {"guided_regex": "["}),
    ("prompt_logprobs", {"prompt_logprobs": V + 1}),
]


@pytest.fixture(scope="module", params=[0, 4])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(num_drafts=request.param, wrong_every=3) as running:
        yield running


def test_bad_requests_do_nothing_to_those_that_run(server: Server) -> None:
    """D01, D03, D04, D06: refused while five others run, whose values stay what they were."""
    bodies = [
        {"prompt": f"free {i}", "temperature": i % 2, "seed": i, "max_tokens": 60,
         "min_tokens": 10, "ignore_eos": True, "logprobs": 2}
        for i in range(5)
    ]  # fmt: skip

    def ask(body: dict[str, Any]) -> Any:
        return server.post(COMPLETIONS, body).json()["choices"]

    alone = [ask(body) for body in bodies]
    assert server.target is not None
    server.target.delay = 0.03  # there is time to refuse while they run
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(ask, body) for body in bodies]
        server.until(lambda now: now.num_running == 5)
        for param, more in BAD:
            answer = server.post(COMPLETIONS, {"prompt": "x", **more})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
        assert server.engine.snapshot().num_running > 0, "they were to be refused meanwhile"
        server.target.delay = 0.0
        assert [one.result(30) for one in running] == alone
    server.alive()


def resident() -> int:
    """Bytes of this process, in which the server runs."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_numbers_of_any_size_take_no_memory(server: Server) -> None:
    """D01, D02: what is too many is refused before anything is made of it."""
    before = resident()
    for path, more in (
        (COMPLETIONS, {"prompt": "x", "n": 10**7}),
        (COMPLETIONS, {"prompt": "x", "n": 10**7, "stream": True}),
        (COMPLETIONS, {"prompt": "x", "logprobs": 10**9}),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 10**12}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 10**7}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "x"}],
                "logprobs": True,
                "top_logprobs": 10**7,
            },
        ),
    ):
        assert server.post(path, more).status_code == 400
    assert resident() - before < 50e6
    server.alive()
