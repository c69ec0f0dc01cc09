"""Servers without drafting, with a perfect drafter, and with one that is often wrong."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from support.serving import Server, saying_server

SETTINGS = {
    "plain": {},
    "perfect": {"num_drafts": 5},
    "mixed": {"num_drafts": 4, "wrong_every": 3},
}


@pytest.fixture(scope="session", params=list(SETTINGS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(**SETTINGS[request.param]) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
