"""Hours in minutes: clients of every kind against a server, and what must hold throughout (Linux).

python benchmarks/soak.py [--seconds 120] [--clients 64] [--seed 0] [MODEL]

Starts a server, fills its KV cache, lets clients call, stream, wait, hang up, read slowly or not at
all, ask for nonsense and run out of time, and in the end sends SIGTERM in the middle of them.
Holds, or the program says what did not and ends with 1:

- no status of 500 or more, except 503 `shutting_down` after the signal; no broken answer, no hang;
- `/health` answers 200 within 100 ms all the time;
- afterwards nothing runs or waits, and no KV page is held;
- resident memory is within 5% of what it was after the warm-up;
- after the signal, what had begun is answered whole, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

import record
from server_footprint import wait_for_answer
from traffic import GONE, Limits, Report, run_clients

PORT = 8125
URL = f"http://127.0.0.1:{PORT}"
KV_TOKENS = 4096  # few, so that the warm-up can touch every page
OPTIONS = {
    "--port": PORT,
    "--kv-tokens": KV_TOKENS,
    "--max-num-reqs": 16,
    "--max-queue": 40,
    "--slow-reader-timeout": 3,
    "--grace-seconds": 60,
    "--log-level": "warning",
}
HEALTH_LIMIT_MS = 100.0
MEMORY_LIMIT = 1.05
WARM_UP_SECONDS = 60.0  # oneDNN keeps a kernel for each number of rows it meets, half a MiB apiece
DRAIN_SECONDS = 4.0


@dataclass
class Health:
    """Asks `/health` ten times a second on a connection that it keeps, in a thread of its own."""

    latencies_ms: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
        while not self._stop.wait(0.1):
            began = time.perf_counter()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.latencies_ms.append(1000 * (time.perf_counter() - began))
            if answer.status != 200:
                self.faults.append(f"/health answered {answer.status}")
        connection.close()

    def quantile(self, share: float) -> float:
        """The latency that this share of the answers kept within, ms."""
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered), math.ceil(share * len(ordered))) - 1]


def metrics() -> dict[str, float]:
    """The server's gauges and counters by name."""
    text = httpx.get(f"{URL}/metrics", timeout=10).raise_for_status().text
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def rest(limit: float = 60.0) -> list[str]:
    """Wait until nothing runs; what is left after the limit."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    end = time.monotonic() + limit
    while True:
        now = metrics()
        left = [f"{name} is {now[name]} at rest" for name in names if now[name]]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def fill_cache(vocab_size: int) -> None:
    """Touch every page: prompts that share nothing, until the prefix cache holds nearly all."""
    size = KV_TOKENS // 8
    for number in range(100):
        prompt = [(number * 7919 + 31 * i) % vocab_size for i in range(size)]
        body = {"prompt": prompt, "max_tokens": 1}
        httpx.post(f"{URL}/v1/completions", json=body, timeout=120).raise_for_status()
        if metrics()["emberline:kv_cache_cached_perc"] > 0.95:
            return
    raise SystemExit("the prefix cache does not fill")


def traffic(limits: Limits, args: argparse.Namespace, seconds: float, what: str) -> Report:
    """One stretch of traffic, shown as it goes."""
    with Progress(console=Console(stderr=True)) as bar:
        task, began = bar.add_task(what, total=seconds), time.monotonic()

        def show(report: Report) -> None:
            counted = f"{what}: {len(report.outcomes)} calls, {len(report.faults)} faults"
            bar.update(task, completed=time.monotonic() - began, description=counted)

        return asyncio.run(
            run_clients(
                URL,
                limits,
                num_clients=args.clients,
                seconds=seconds,
                seed=args.seed,
                patience=args.patience,
                done=show,
            )
        )


def drain(
    server: subprocess.Popen[bytes], limits: Limits, args: argparse.Namespace
) -> tuple[Report, list[str]]:
    """Traffic with a signal in its middle."""
    signal = threading.Timer(DRAIN_SECONDS / 2, server.terminate)
    signal.start()
    # Until the last client has been told: the drain takes as long as what has begun.
    report = traffic(limits, args, args.patience, "draining")
    try:
        code = server.wait(30)
    except subprocess.TimeoutExpired:
        return report, ["the server did not end"]
    return report, [] if code == 0 else [f"exit code {code}"]


def faults_of(report: Report, *, ending: bool) -> list[str]:
    """What must not have happened to any call."""
    allowed = {"200", "400", "429", "left"} | ({"503"} if ending else set())
    others = [f"{n} answers of {status}" for status, n in report.statuses().items()
              if status not in allowed]  # fmt: skip
    # A server that has ended listens no more: those who come after it find nobody.
    refused = f": {GONE}"
    return others + [one for one in report.faults if not (ending and one.endswith(refused))]


def soak(
    server: subprocess.Popen[bytes], args: argparse.Namespace
) -> tuple[dict[str, object], list[str]]:
    """Warm up, soak, drain. The figures, and what did not hold."""
    info = httpx.get(f"{URL}/server_info").raise_for_status().json()
    limits = Limits(vocab_size=info["vocab_size"], prompt_tokens=96, max_tokens=args.tokens)
    fill_cache(limits.vocab_size)
    warm = traffic(limits, args, WARM_UP_SECONDS, "warming up")
    faults = faults_of(warm, ending=False) + rest()
    before = resident_mib(server.pid)
    with Health() as health:
        report = traffic(limits, args, args.seconds, "soaking")
        faults += faults_of(report, ending=False) + rest()
    after, counters = resident_mib(server.pid), metrics()
    if after > before * MEMORY_LIMIT:
        faults.append(f"resident memory went from {before:.0f} to {after:.0f} MiB")
    if max(health.latencies_ms) > HEALTH_LIMIT_MS:
        faults.append(f"/health took {max(health.latencies_ms):.0f} ms")
    drained, ends = drain(server, limits, args)
    faults += health.faults + faults_of(drained, ending=True) + ends
    figures: dict[str, object] = {
        "seconds": args.seconds,
        "clients": args.clients,
        "calls": len(report.outcomes),
        "statuses": report.statuses(),
        "kinds": report.kinds(),
        "longest_call_seconds": round(report.longest_seconds, 2),
        "generated_tokens": round(counters["vllm:generation_tokens_total"]),
        "preemptions": round(counters["vllm:num_preemptions_total"]),
        "prefix_cache_hit_rate": round(
            counters["vllm:prefix_cache_hits_total"] / counters["vllm:prefix_cache_queries_total"],
            3,
        ),
        "slow_readers_cut": round(counters["emberline:slow_readers_cut_total"]),
        "health_calls": len(health.latencies_ms),
        "health_p50_ms": round(health.quantile(0.5), 1),
        "health_p99_ms": round(health.quantile(0.99), 1),
        "health_max_ms": round(max(health.latencies_ms), 1),
        "resident_mib_after_warm_up": round(before),
        "resident_mib_at_the_end": round(after),
        "statuses_while_draining": drained.statuses(),
        "faults": faults,
    }
    return figures, faults


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, write the figures; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="folder or id; the embedded model if absent")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24, help="of the longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds before a call hangs")
    args = parser.parse_args(arguments)
    program = Path(sys.executable).with_name("emberline")
    options = [str(word) for pair in OPTIONS.items() for word in pair]
    server = subprocess.Popen([program, "serve", *([args.model] if args.model else []), *options])
    try:
        wait_for_answer(URL)
        figures, faults = soak(server, args)
    finally:
        server.kill()
        server.wait(30)
    for name, value in figures.items():
        print(f"{name:32} {value}")
    print("written:", record.write("soak", figures))
    if faults:
        raise SystemExit("did not hold:\n" + "\n".join(faults[:20]))


if __name__ == "__main__":
    main()
