"""Clients of every kind at once: nobody is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from test_around import counters

from support.serving import Server, saying_server
from traffic import KINDS, Limits, run_clients


@pytest.fixture(params=[0, 5])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(
        num_drafts=request.param,
        wrong_every=3,
        num_pages=300,
        max_num_reqs=6,
        max_queue=64,
        options={"slow_reader_timeout": 1.0},
    ) as running:
        yield running


def test_traffic_of_every_kind(server: Server) -> None:
    """D22, D24, D25: random lengths, caps, stops, leaves; afterwards everything is as before."""
    limits = Limits(vocab_size=server.engine.vocab_size, prompt_tokens=100, max_tokens=60)
    report = asyncio.run(
        run_clients(server.url, limits, num_clients=24, seconds=5, seed=1, patience=60)
    )
    assert report.faults == []
    assert len(report.kinds()) == len(KINDS)
    assert set(report.statuses()) <= {"200", "400", "429", "left"}
    assert report.statuses()["200"] > 20
    server.rest(20)
    assert counters(server)["emberline:slow_readers_cut_total"] > 0
    server.alive()
