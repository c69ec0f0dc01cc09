"""A client that does not read delays nobody and is cut; one that reads slowly gets everything."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_around import counters

from emberline.server.slow_readers import StuckConnections

from support.serving import Server, saying_server

COMPLETIONS = "/v1/completions"
CUT = "emberline:slow_readers_cut_total"
# About 5 kB of alternatives a token: more than kernels and transports hold after a hundred.
WIDE: dict[str, Any] = {
    "prompt": "free",
    "logprobs": 260,
    "max_tokens": 480,
    "ignore_eos": True,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = {"slow_reader_timeout": 1.0}
    with saying_server(max_model_len=512, delay=0.01, max_num_reqs=4, options=options) as running:
        yield running


@contextlib.contextmanager
def calling(server: Server, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A call on a connection whose client can hold next to nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.settimeout(20)
        connection.sendall(head.encode() + content)
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    answer = b""
    while part := connection.recv(65536):
        answer += part
    return answer


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_cut(server: Server, stream: bool) -> None:
    before, end = counters(server)[CUT], time.monotonic() + 30
    with calling(server, {**WIDE, "stream": stream}) as connection:
        server.until(lambda state: state.num_running == 1)
        while counters(server)[CUT] == before:  # others are answered meanwhile
            server.complete("<say>ok</say>", max_tokens=3)
            assert time.monotonic() < end
        with pytest.raises(ConnectionResetError):
            read_to_the_end(connection)
    server.alive()
    assert counters(server)[CUT] == before + 1


def test_a_stream_that_is_cut_ends_its_request() -> None:
    aborted = "vllm:request_success_total[('finished_reason', 'abort')]"
    options = {"slow_reader_timeout": 0.5}
    body = {**WIDE, "max_tokens": 4000, "stream": True}
    with (
        saying_server(max_model_len=4096, delay=0.01, options=options) as server,
        calling(server, body),
    ):
        end = time.monotonic() + 30
        while counters(server)[CUT] == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        server.rest(1.0)
        assert counters(server)[aborted] == 1
        assert server.engine.snapshot().generation_tokens < 3000
        server.alive()


def test_a_client_that_reads_slowly_gets_everything(server: Server) -> None:
    """It takes several times the limit, but never stands still for as long."""
    body = {**WIDE, "max_tokens": 200}
    before, expected = counters(server)[CUT], server.stream(COMPLETIONS, body)
    answer, began = b"", time.monotonic()
    with calling(server, {**body, "stream": True}) as connection:
        while b"data: [DONE]" not in answer:
            answer += connection.recv(32768)
            time.sleep(0.01)
    assert time.monotonic() - began > 1.5
    lines = [one for one in answer.split(b"\n") if one.startswith(b"data: {")]
    tokens = tokens_of([json.loads(line[6:]) for line in lines])
    assert tokens == tokens_of(expected)
    assert len(tokens) == 200
    assert counters(server)[CUT] == before


def tokens_of(events: list[dict[str, Any]]) -> list[str]:
    arrays = [event["choices"][0]["logprobs"] for event in events]
    return [token for one in arrays if one for token in one["tokens"]]


class Transport:
    """A connection's transport, as far as it is looked at."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_write_buffer_size(self) -> int:
        return self.size


def test_only_a_buffer_that_stands_still_counts() -> None:
    still, moving, empty = Transport(100), Transport(100), Transport(0)
    stuck = StuckConnections(2.0)
    everyone: Any = [still, moving, empty]
    for now in range(2):
        assert stuck.look(everyone, now) == []
        moving.size -= 1
    assert stuck.look(everyone, 2) == [still]
    assert stuck.look([moving, empty], 3) == []
    assert stuck.look(everyone, 4) == [moving]  # the other one was forgotten: it starts anew
    still.size = 0
    assert stuck.look([still], 6) == []
    still.size = 100
    assert stuck.look([still], 7) == []
    assert stuck.look([still], 9) == [still]


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_limit_without_a_meaning(seconds: float) -> None:
    with pytest.raises(ValueError, match="slow_reader_timeout"):
        StuckConnections(seconds)
