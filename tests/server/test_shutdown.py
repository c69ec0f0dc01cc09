"""A signal: requests finish, or end with the documented error; nothing is cut or logged."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
import uvicorn

from emberline.engine.async_engine import AsyncEngine
from emberline.engine.detokenizer import TokenText
from emberline.server import shutdown
from emberline.server.app import create_app
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
    app = create_app(behind, tokenizer, NAME)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = GracefulServer(
        uvicorn.Config(app, log_config=None, ws="none"), behind, grace_seconds=grace_seconds
    )
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
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_can_finish_does_and_nobody_else_is_let_in() -> None:
    with ThreadPoolExecutor() as pool, graceful(20.0, delay=0.002) as (server, url):
        asked = start(url, pool)
        server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        streamed, plain = (one.result(20) for one in asked)
        assert '"finish_reason":"length"' in streamed.text
        assert plain.json()["usage"]["completion_tokens"] == LONG["max_tokens"]


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
