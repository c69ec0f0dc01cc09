"""A client that hangs up frees what it held, at any stage."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from support.serving import Server, say, saying_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "free", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module", params=[0, 4])
def slow(request: pytest.FixtureRequest) -> Iterator[Server]:
    with saying_server(num_drafts=request.param, delay=0.02, max_num_reqs=2) as running:
        yield running


def send(server: Server, path: str, body: object) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def until_running(server: Server, running: int = 1) -> None:
    end = time.monotonic() + 5
    while server.engine.snapshot().num_running < running:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait", [0.0, 0.2])
def test_hanging_up_stops_the_generation(slow: Server, stream: bool, wait: float) -> None:
    """D24."""
    connection = send(slow, COMPLETIONS, {**LONG, "stream": stream})
    until_running(slow)
    time.sleep(wait)
    before = slow.engine.snapshot().generation_tokens
    connection.close()
    slow.rest(1.0)
    assert slow.engine.snapshot().generation_tokens - before < 100
    slow.alive()


def test_hanging_up_frees_every_choice_and_the_waiting(slow: Server) -> None:
    connection = send(slow, COMPLETIONS, {**LONG, "n": 8, "stream": True})
    until_running(slow, 2)
    assert slow.engine.snapshot().num_waiting == 6
    connection.close()
    slow.rest(1.0)
    assert 'finished_reason="abort"' in slow.get("/metrics").text


def test_hanging_up_before_the_body_is_sent(slow: Server) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    slow.alive()


def test_stop_button_and_a_new_turn(slow: Server) -> None:
    """D25: close after a few tokens, send again at once; the answer is the undisturbed one."""
    body = {**LONG, "max_tokens": 12, "temperature": 0}
    expected = slow.post(COMPLETIONS, body).json()["choices"][0]["text"]
    for _ in range(8):
        connection = send(slow, COMPLETIONS, {**LONG, "temperature": 0, "stream": True})
        assert connection.recv(64)
        connection.close()
        assert slow.post(COMPLETIONS, body).json()["choices"][0]["text"] == expected
    slow.alive()


def test_a_slow_reader_delays_nobody_and_loses_nothing(slow: Server) -> None:
    body = {"prompt": say("ab" * 40), "temperature": 0, "max_tokens": 81, "logprobs": 2}
    expected = slow.post(COMPLETIONS, body).json()["choices"][0]["text"]
    connection = send(slow, COMPLETIONS, {**body, "stream": True})
    until_running(slow)
    slow.rest()  # ended although nothing was read
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(65536)
    connection.close()
    assert data.count(b'"finish_reason":"') == 1
    texts = [
        json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        for line in data.decode().splitlines()
        if line.startswith("data: {")
    ]
    assert "".join(texts) == expected
