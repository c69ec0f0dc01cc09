"""A server in a process of its own, as a user starts it: `emberline serve` on a free port."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

BANNER = re.compile(r"API +(http://\S+)/v1\b")


@dataclass(frozen=True)
class Program:
    """A running `emberline serve`."""

    url: str  # without /v1
    name: str  # of the model served
    log: Path  # what it writes to standard error

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60).raise_for_status()

    def info(self) -> dict[str, Any]:
        return dict(self.get("/server_info").json())

    def counter(self, name: str) -> int:
        """A counter of `/metrics`, over all its labels."""
        samples = re.findall(
            rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.M
        )
        assert samples, name
        return int(sum(map(float, samples)))

    def check(self) -> None:
        """Healthy, nothing left behind, nothing logged that a server should not log."""
        assert self.get("/health").status_code == 200
        deadline = time.monotonic() + 30
        while self.counter("vllm:num_requests_running") or self.counter(
            "vllm:num_requests_waiting"
        ):
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.1)
        assert "Traceback" not in self.log.read_text()


@contextlib.contextmanager
def program(log: Path, *arguments: str, seconds: float = 300.0) -> Iterator[Program]:
    """Serve until the end of the block; it must then end by itself, with exit code 0.

    Args:
        log: file for its standard error.
        arguments: of `emberline serve`, without `--port`.
        seconds: how long the start may take, measuring the machine's step costs included.
    """
    command = [Path(sys.executable).with_name("emberline"), "serve", *arguments, "--port", "0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        url = _url(process, log, seconds)
        yield Program(url, _name(url), log)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def _url(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if found := BANNER.search(log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"no server came up:\n{log.read_text()}")


def _name(url: str) -> str:
    """What the server calls its model; it says its address just before it listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            info = httpx.get(f"{url}/server_info", timeout=60).raise_for_status().json()
            return str(info["model_name"])
        except httpx.ConnectError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.1)
