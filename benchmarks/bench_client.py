"""What the load tool's client costs an event of a stream, beside a general HTTP client.

python benchmarks/bench_client.py [--concurrency 16 64 256] [--events 50]

A bare server in another process sends every answer as chunks, one every 5 ms. Both clients take the
same answers in turn, parse the events and read their JSON; processor time is this process's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from itertools import repeat
from multiprocessing.synchronize import Event

import httpx

from emberline.bench.client import Client
from emberline.bench.load import run_level
from emberline.bench.settings import ClosedLoop, LoadSettings, ServerSettings
from emberline.bench.sse import EventParser

import record

PORT = 8124
URL = f"http://127.0.0.1:{PORT}"
GAP_SECONDS = 0.005
REQUESTS_A_USER = 4
BODY = b'{"prompt": "x"}'
CHUNK = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": "stop"}
    ],
}


class Answering(asyncio.Protocol):
    """Answers whatever comes with the same chunks."""

    def __init__(self, num_events: int) -> None:
        self._num_events = num_events
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where answers go."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Begin an answer once a request is whole."""
        self._received += data
        if self._received.endswith(BODY):
            self._received = b""
            head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            self._transport.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            self._send(self._num_events)

    def _send(self, left: int) -> None:
        if self._transport.is_closing():
            return
        event = f"data: {json.dumps(CHUNK) if left else '[DONE]'}\n\n".encode()
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        if left:
            asyncio.get_running_loop().call_later(GAP_SECONDS, self._send, left - 1)
        else:
            self._transport.write(b"0\r\n\r\n")


def serve(num_events: int, ready: Event) -> None:
    """The server's process."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Answering(num_events), "127.0.0.1", PORT)
        ready.set()
        await server.serve_forever()

    asyncio.run(run())


async def ours(concurrency: int) -> int:
    """The tool's own client; events read."""
    client, level = Client(ServerSettings(base_url=URL)), ClosedLoop(concurrency)
    load = LoadSettings(levels=(level,), num_requests=concurrency * REQUESTS_A_USER)
    run = await run_level(client, level, load, repeat(BODY), lambda _record: None)
    client.close()
    return sum(len(one.chunk_times) for one in run.records)


async def general(concurrency: int) -> int:
    """One httpx.AsyncClient without limits; events read."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None) as client:

        async def user() -> int:
            count = 0
            for _ in range(REQUESTS_A_USER):
                parser = EventParser()
                async with client.stream("POST", URL, content=BODY) as answer:
                    async for data in answer.aiter_raw():
                        time.perf_counter()
                        for event in parser.feed(data):
                            count += event != b"[DONE]" and bool(json.loads(event)["choices"])
            return count

        return sum(await asyncio.gather(*(user() for _ in range(concurrency))))


def main() -> None:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--events", type=int, default=50, help="of an answer")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    server = context.Process(target=serve, args=(args.events, ready), daemon=True)
    server.start()
    ready.wait(60)
    levels = []
    for concurrency in args.concurrency:
        level: dict[str, float] = {"concurrency": concurrency}
        for name, client in (("bench", ours), ("httpx", general)):
            began, computed = time.perf_counter(), time.process_time()
            count = asyncio.run(client(concurrency))
            assert count == concurrency * REQUESTS_A_USER * args.events, (name, count)
            level[f"{name}_events_per_second"] = round(count / (time.perf_counter() - began))
            busy = time.process_time() - computed
            level[f"{name}_us_per_event"] = round(1e6 * busy / count, 1)
        level["ratio_us"] = round(level["httpx_us_per_event"] / level["bench_us_per_event"], 2)
        levels.append(level)
        print(level)
    server.terminate()
    server.join()
    figures: dict[str, object] = {"gap_seconds": GAP_SECONDS, "events": args.events}
    print("written:", record.write("bench-client", {**figures, "levels": levels}))


if __name__ == "__main__":
    main()
