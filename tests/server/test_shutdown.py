"""A signal: requests finish, or end with the documented error; nothing is cut or logged."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from test_model_logprobs import make_folder

from emberline.engine.async_engine import AsyncEngine
from emberline.engine.detokenizer import TokenText
from emberline.server import shutdown
from emberline.server.run import make_server
from emberline.server.shutdown import GracefulServer

from support.engines import make_engine
from support.serving import NAME, SayingTarget, make_tokenizer

LONG = {"prompt": "free", "max_tokens": 240, "ignore_eos": True, "temperature": 0}


@contextlib.contextmanager
def graceful(grace_seconds: float, delay: float) -> Iterator[tuple[GracefulServer, str]]:
    """A running server; it must have ended by itself at the end of the block."""
    tokenizer = make_tokenizer()
    target = SayingTarget(tokenizer)
    target.delay = delay
    engine = make_engine(target, None, num_pages=256, eos_ids=(target.eos,), max_num_reqs=1)
    behind = AsyncEngine(engine, TokenText(tokenizer))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make_server(behind, tokenizer, NAME, grace_seconds=grace_seconds)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield server, url
    finally:
        server.handle_exit(signal.SIGTERM, None)
        server.handle_exit(signal.SIGTERM, None)
        thread.join(15)
        assert not thread.is_alive()
        assert not behind.health().ok


def start(url: str, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """One that runs and streams, then one that waits for it."""
    asked = []
    for state, more in (("running", {"stream": True}), ("waiting", {})):
        body = {**LONG, **more}
        asked.append(pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=30))
        wanted = f'num_requests_{state}{{engine="0",model_name="{NAME}"}} 1.0'
        end = time.monotonic() + 10
        while wanted not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.02)
    return asked


@pytest.mark.parametrize("hurried", [False, True])
def test_what_cannot_finish_gets_the_documented_error(
    hurried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    grace = 30.0 if hurried else 0.3
    with caplog.at_level(logging.INFO), ThreadPoolExecutor() as pool:
        with graceful(grace, delay=0.05) as (server, url):
            asked = start(url, pool)
            server.handle_exit(signal.SIGTERM, None)
            if hurried:
                time.sleep(0.3)
                assert not any(one.done() for one in asked)
                server.handle_exit(signal.SIGTERM, None)
            streamed, plain = (one.result(10) for one in asked)
        events = [part.removeprefix("data: ") for part in streamed.text.split("\n\n") if part]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["type"] == "service_unavailable_error"
        assert plain.status_code == 503
        assert "shut down" in plain.json()["error"]["message"]
    assert f"draining: 1 requests running, 1 waiting, at most {grace:g} s" in caplog.text
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_can_finish_does_and_nobody_else_is_let_in() -> None:
    with (
        ThreadPoolExecutor() as pool,
        httpx.Client(timeout=20) as kept,
        graceful(20.0, delay=0.004) as (server, url),
    ):
        assert kept.get(f"{url}/health").status_code == 200
        asked = start(url, pool)
        server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.3)
        for client in (kept, httpx):  # a connection from before the signal, and new ones
            refusal = client.post(f"{url}/v1/completions", json=LONG)
            assert refusal.status_code == 503
            assert refusal.json()["error"]["code"] == "shutting_down"
            assert refusal.json()["error"]["type"] == "service_unavailable_error"
            assert int(refusal.headers["retry-after"]) >= 1
            assert refusal.headers["connection"] == "close"
        streamed = httpx.post(f"{url}/v1/completions", json={**LONG, "stream": True})
        assert (streamed.status_code, streamed.json()["error"]["code"]) == (503, "shutting_down")
        assert httpx.post(f"{url}/tokenize", json={"prompt": "x"}).status_code == 503
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert not any(one.done() for one in asked)
        streamed, plain = (one.result(20) for one in asked)
        assert '"finish_reason":"length"' in streamed.text
        assert plain.json()["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_an_idle_server_ends_at_once() -> None:
    with graceful(20.0, delay=0.0) as (server, url):
        server.handle_exit(signal.SIGTERM, None)
        began = time.monotonic()
        with contextlib.suppress(httpx.TransportError):
            while httpx.get(f"{url}/health").status_code == 503:
                assert time.monotonic() < began + 3


def test_what_is_sent_by_the_signal_counts_as_new_until_it_is_whole() -> None:
    """Its body comes after the signal: the client hears why, the others are not kept waiting."""
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        graceful(20.0, delay=0.0) as (server, url),
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5) as client,
    ):
        client.sendall(head.encode() + body[:5])
        time.sleep(0.2)
        server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.2)
        client.sendall(body[5:])
        answer = b""
        while part := client.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"shutting_down"' in answer


def test_a_client_in_the_middle_of_its_body_is_cut(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "ENDING_SECONDS", 0.3)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with (
        caplog.at_level(logging.INFO),
        graceful(0.1, delay=0.0) as (server, url),
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client,
    ):
        client.sendall(head.encode())
        time.sleep(0.2)
        server.handle_exit(signal.SIGTERM, None)
        client.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""
    assert "Traceback" not in caplog.text


def test_a_process_drains_under_load(tmp_path: Path) -> None:
    """What runs and waits at the signal is answered whole, new requests hear 503, exit code 0."""
    folder, port = make_folder(tmp_path / "small"), free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", "from emberline.cli import main; main()", "serve", str(folder),
         "--port", str(port), "--dtype", "float32", "--max-num-reqs", "2", "--drafter", "none",
         "--log-level", "warning"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1/completions"
    signalled = threading.Event()
    try:
        until_up(url)
        with ThreadPoolExecutor() as pool, httpx.Client(timeout=30) as kept:
            clients = [pool.submit(ask_until, signalled, url, i) for i in range(8)]
            time.sleep(1.0)
            kept.post(url, json={"prompt": "x", "max_tokens": 1}).raise_for_status()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            signalled.set()
            for client in (kept, httpx):
                refusal = client.post(url, json={"prompt": "x", "max_tokens": 1})
                assert refusal.status_code == 503, refusal.text
                assert refusal.json()["error"]["code"] == "shutting_down"
            began = time.monotonic()
            assert sum(client.result(40) for client in clients) >= 8
        _, shown = process.communicate(timeout=20)
        assert process.returncode == 0
        assert time.monotonic() - began < 30  # the grace is a limit, not a wait
        assert "Traceback" not in shown
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until_up(url: str) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(httpx.ConnectError):
            httpx.post(url, json={"prompt": "x", "max_tokens": 1}, timeout=60).raise_for_status()
            return
        time.sleep(0.1)
    raise AssertionError("the server did not come up")


def ask_until(signalled: threading.Event, url: str, number: int) -> int:
    """Ask one after another until the signal; how many answers came, each of them whole.

    Half of the clients keep their connection, the others open one a request.
    """
    body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "seed": number}
    count = 0
    with httpx.Client(timeout=30) as kept:
        post = kept.post if number % 2 else partial(httpx.post, timeout=30)
        while not signalled.is_set():
            streams = count % 2 == 0
            answer = post(url, json={**body, "stream": streams})
            if answer.status_code == 503:  # sent after the signal, before we knew
                assert answer.json()["error"]["code"] == "shutting_down"
                break
            if streams:
                assert answer.text.endswith("data: [DONE]\n\n")
                assert answer.text.count('"finish_reason":"length"') == 1
            else:
                assert answer.json()["usage"]["completion_tokens"] == 60
            count += 1
    return count
