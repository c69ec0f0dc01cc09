"""Start-up time and peak memory of `emberline serve` on a warm cache (Linux).

python benchmarks/server_footprint.py [--concurrency 8] [--tokens 1000]

Starts the server, waits for the first answered request, then runs requests side by side, each with
half of its tokens as prompt and half generated, and reads the process's peak resident memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

import record

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"


def wait_for_answer(url: str, limit: float = 120.0) -> dict[str, object]:
    """Ask until somebody answers."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": question, "temperature": 0, "logprobs": True, "max_tokens": 32}
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        try:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=limit)
            return dict(answer.raise_for_status().json())
        except httpx.ConnectError:
            time.sleep(0.1)
    raise SystemExit("the server did not come up")


def peak_mib(pid: int) -> float:
    """Peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def load(index: int, tokens: int) -> int:
    """One request; returns its completion tokens."""
    body = {
        "prompt": [1000 + (index * 7919 + 31 * i) % 40_000 for i in range(tokens // 2)],
        "max_tokens": tokens - tokens // 2,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": index,
        "logprobs": 5,
    }
    answer = httpx.post(f"{URL}/v1/completions", json=body, timeout=900)
    return int(answer.raise_for_status().json()["usage"]["completion_tokens"])


def main() -> None:
    """Measure, print, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000, help="prompt and answer, a request")
    args = parser.parse_args()
    program = Path(sys.executable).with_name("emberline")
    started = time.monotonic()
    server = subprocess.Popen([program, "serve", "--port", str(PORT), "--log-level", "warning"])
    try:
        wait_for_answer(URL)
        seconds = time.monotonic() - started
        idle = peak_mib(server.pid)
        info = httpx.get(f"{URL}/server_info").raise_for_status().json()
        began = time.monotonic()
        with ThreadPoolExecutor(args.concurrency) as pool:
            counts = list(pool.map(lambda i: load(i, args.tokens), range(args.concurrency)))
        busy = time.monotonic() - began
        peak = peak_mib(server.pid)
    finally:
        server.terminate()
        server.wait(60)
    figures: dict[str, object] = {
        "start_to_first_answer_seconds": round(seconds, 2),
        "peak_mib_after_start": round(idle),
        "peak_mib_under_load": round(peak),
        "concurrency": args.concurrency,
        "completion_tokens": sum(counts),
        "load_seconds": round(busy, 1),
        "threads": info["threads"],  # the server's, not this program's
    }
    for name, value in figures.items():
        print(f"{name:32} {value}")
    print("written:", record.write("server-footprint", figures))


if __name__ == "__main__":
    main()
