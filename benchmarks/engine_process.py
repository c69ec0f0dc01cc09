"""Streaming over HTTP: the engine in a thread of the server, and in a process of its own.

python benchmarks/engine_process.py [--clients 128] [--tokens 1024] [--step-ms 2] [--rounds 3]
    [--tokens-per-step 4] [--logprobs N] [--client-processes 4] [--chat]

An engine without a model gives every client so many tokens a step. Its own speed, without a server,
is what the two are compared to: a ratio of 1 says that HTTP costs no throughput. Clients count the
tokens that they are told of, from processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from emberline.types import Request, SamplingParams

import record
from scripted_engine import NAME, ScriptedEngine, make_scripted

ARMS = ("thread", "process")


@dataclass(frozen=True)
class Load:
    """What is asked of a server."""

    clients: int
    tokens: int
    logprobs: int | None
    chat: bool

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> bytes:
        """Of one request."""
        asked: dict[str, Any] = {
            "max_tokens": self.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            asked["messages"] = [{"role": "user", "content": "Say something."}]
        else:
            asked["prompt"] = [5, 6, 7, 8]
        if self.logprobs is not None and self.chat:
            asked |= {"logprobs": True, "top_logprobs": self.logprobs}
        elif self.logprobs is not None:
            asked["logprobs"] = self.logprobs
        return json.dumps(asked).encode()


def alone(load: Load, settings: dict[str, Any]) -> float:
    """Tokens a second of the engine, nobody reading."""
    engine = ScriptedEngine(**settings)
    params = SamplingParams(max_tokens=load.tokens, logprobs=load.logprobs)
    for number in range(load.clients):
        engine.add(Request(f"r{number}", (5, 6, 7, 8), params))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return engine.snapshot().generation_tokens / (time.perf_counter() - began)


def make_tokenizer() -> Any:
    """A byte-level one that knows bytes only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


def serve(arm: str, port: int, settings: dict[str, Any]) -> None:
    """Serve the engine until a signal comes."""
    from emberline.engine.async_engine import AsyncEngine
    from emberline.engine.detokenizer import TokenText
    from emberline.engine.process_engine import StartingEngine
    from emberline.engine.running_engine import RunningEngine
    from emberline.server.run import make_server

    tokenizer = make_tokenizer()
    text = TokenText(tokenizer)
    engine: RunningEngine
    if arm == "thread":
        engine = AsyncEngine(ScriptedEngine(**settings), text)
    else:
        with StartingEngine(partial(make_scripted, settings)) as starting:
            starting.found()
            engine = starting.ready(text)
    listener = socket.create_server(("127.0.0.1", port))
    make_server(engine, tokenizer, NAME, log_level="warning").run(sockets=[listener])


async def _stream(port: int, request: bytes) -> tuple[int, int]:
    """One answer: the tokens it says it has, and how many events it came in."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(request)
    usage, events, tail = 0, 0, b""
    while data := await reader.read(2**18):
        tail = (tail + data)[-4096:]
        events += data.count(b"data: ")
        if b"data: [DONE]" in tail:
            break
    writer.close()
    for line in tail.splitlines():
        if line.startswith(b"data: {") and b'"usage":{' in line:
            usage = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return usage, events


def _clients(port: int, number: int, load: Load) -> tuple[int, int]:
    """So many clients of one process; their tokens and events together."""
    body = load.body()
    head = (
        f"POST {load.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )

    async def all_of_them() -> list[tuple[int, int]]:
        return await asyncio.gather(*(_stream(port, head.encode() + body) for _ in range(number)))

    answers = asyncio.run(all_of_them())
    return sum(tokens for tokens, _ in answers), sum(events for _, events in answers)


def over_http(arm: str, port: int, load: Load, pool: ProcessPoolExecutor, shares: int) -> Any:
    """Tokens a second that clients hear of, and tokens an event."""
    numbers = [load.clients // shares + (i < load.clients % shares) for i in range(shares)]
    began = time.perf_counter()
    told = list(pool.map(_clients, [port] * shares, numbers, [load] * shares))
    seconds = time.perf_counter() - began
    tokens, events = (sum(column) for column in zip(*told, strict=True))
    if tokens != load.clients * load.tokens:
        raise SystemExit(f"{arm}: {tokens} tokens came, not {load.clients * load.tokens}")
    return {"tokens_per_second": tokens / seconds, "tokens_per_event": tokens / events}


def _wait(port: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not come up")


def measure(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    """All arms in turn, round by round."""
    settings = {"step_seconds": args.step_ms / 1000, "tokens_per_step": args.tokens_per_step}
    ports = {arm: args.port + number for number, arm in enumerate(ARMS)}
    rest = ["--step-ms", str(args.step_ms), "--tokens-per-step", str(args.tokens_per_step)]
    servers = [
        subprocess.Popen([sys.executable, __file__, "--serve", arm, "--port", str(port), *rest])
        for arm, port in ports.items()
    ]
    found: dict[str, list[Any]] = {arm: [] for arm in ARMS}
    by_itself: list[float] = []
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(args.client_processes, mp_context=spawn) as pool:
            for port in ports.values():
                _wait(port)
            for turn in range(args.rounds + 1):  # the first warms up
                speed = alone(load, settings)
                for arm, port in ports.items():
                    told = over_http(arm, port, load, pool, args.client_processes)
                    if turn:
                        found[arm].append(told)
                if turn:
                    by_itself.append(speed)
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(30)
    engine = statistics.median(by_itself)
    arms = {
        arm: {key: statistics.median(one[key] for one in told) for key in told[0]}
        for arm, told in found.items()
    }
    for one in arms.values():
        one["of_the_engine_alone"] = one["tokens_per_second"] / engine
    return {"engine_alone": engine, "arms": arms}


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--tokens-per-step", type=int, default=4)
    parser.add_argument("--logprobs", type=int, help="alternatives a token; default: no records")
    parser.add_argument("--chat", action="store_true", help="conversations, not completions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client-processes", type=int, default=4)
    parser.add_argument("--port", type=int, default=8150, help="of the first server")
    parser.add_argument("--out", default="engine-process", help="name of the results file")
    parser.add_argument("--serve", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        step = {"step_seconds": args.step_ms / 1000, "tokens_per_step": args.tokens_per_step}
        serve(args.serve, args.port, step)
        return
    load = Load(args.clients, args.tokens, args.logprobs, args.chat)
    figures = measure(args, load)
    table = Table("engine in", "tokens/s", "of the engine alone", "tokens an event")
    table.add_row("no server", f"{figures['engine_alone']:.0f}", "1.00", "")
    for arm, one in figures["arms"].items():
        table.add_row(
            f"a {arm}",
            f"{one['tokens_per_second']:.0f}",
            f"{one['of_the_engine_alone']:.2f}",
            f"{one['tokens_per_event']:.1f}",
        )
    Console(width=100).print(table)
    asked = {name: getattr(load, name) for name in ("clients", "tokens", "logprobs", "chat")}
    step = {"step_ms": args.step_ms, "tokens_per_step": args.tokens_per_step}
    cores = {"cores": multiprocessing.cpu_count()}
    figures = {"unit": "output tokens per second", **cores, **asked, **step, **figures}
    print("written:", record.write(args.out, figures))


if __name__ == "__main__":
    main()
