"""A server in a thread that answers with scripted bytes: other engines' shapes, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HANG_UP = object()  # in `parts`: the connection ends here


@dataclass
class Asked:
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Reply:
    """An answer: `parts` are bytes (a chunk each), seconds to wait, or HANG_UP."""

    parts: Sequence[object] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    keep_alive: bool = True
    raw: bytes | None = None  # instead of an HTTP answer


def event(data: object) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def chat_chunk(text: str | None = None, finish: str | None = None, **root: object) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"id": "x", "object": "chat.completion.chunk", "choices": [choice], **root})


def usage_chunk(prompt: int, completion: int, **root: object) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": {**counts, **root.pop("usage", {})}, **root})  # type: ignore[dict-item]


DONE = event("[DONE]")


def json_reply(data: object, status: int = 200) -> Reply:
    return Reply([json.dumps(data).encode()], status, "application/json")


def models(*names: str) -> Reply:
    return json_reply({"object": "list", "data": [{"id": name} for name in names]})


Answer = Callable[[Asked], Reply]


@dataclass
class FakeServer:
    """The running server: what it was asked, and how many requests were in flight at most."""

    port: int
    asked: list[Asked] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def posts(self) -> list[Asked]:
        return [one for one in self.asked if one.method == "POST"]


@contextlib.contextmanager
def fake_server(answer: Answer) -> Iterator[FakeServer]:
    """Serve until the end of the block."""
    started, stop = threading.Event(), asyncio.Event()
    server = FakeServer(0)
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server.connections += 1
            try:
                while await _exchange(server, answer, reader, writer):
                    pass
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # the client has hung up
            finally:
                writer.close()

        listener = await asyncio.start_server(connected, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets close

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()


async def _exchange(
    server: FakeServer, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """One request and its answer; whether the connection stays."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:-2])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    asked = Asked(method, path, headers, body)
    server.asked.append(asked)
    server.in_flight += method == "POST"
    server.peak = max(server.peak, server.in_flight)
    try:
        return await _reply(answer(asked), writer)
    finally:
        server.in_flight -= method == "POST"


async def _reply(reply: Reply, writer: asyncio.StreamWriter) -> bool:
    if reply.raw is not None:
        writer.write(reply.raw)
        await writer.drain()
        return False
    lines = [
        f"HTTP/1.1 {reply.status} Said",
        f"Content-Type: {reply.content_type}",
        "Transfer-Encoding: chunked",
        *([] if reply.keep_alive else ["Connection: close"]),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    for part in reply.parts:
        if part is HANG_UP:
            return False
        if isinstance(part, bytes):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        elif isinstance(part, int | float):
            await asyncio.sleep(part)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return reply.keep_alive
