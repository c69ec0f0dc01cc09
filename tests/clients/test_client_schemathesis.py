"""schemathesis on the server's own OpenAPI document: whatever it sends, nothing is a 500."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.program import Program, program

NUM_CASES = 2000


@pytest.fixture(scope="module")
def hurried(logs: Path) -> Iterator[Program]:
    """The default model; no request takes longer than a moment, however much it asks for."""
    options = ("--threads", "1", "--request-timeout", "0.2", "--max-queue", "16")
    with program(logs / "hurried.log", *options) as served:
        yield served
        served.check()


@pytest.mark.timeout(2400)
def test_nothing_is_a_server_error(
    hurried: Program,
    documented: Callable[..., list[list[str]]],
    run_client: Callable[..., str],
    tmp_path: Path,
) -> None:
    (command,) = documented("st", hurried)
    said = run_client(
        *(*command, "--phases", "examples,coverage,fuzzing", "--seed", "1", "--warnings", "off"),
        *("--suppress-health-check", "all", "--generation-database", "none"),
        cwd=tmp_path,
        seconds=2400,
    )
    generated = re.search(r"(\d+) generated", said)
    assert generated, said
    assert int(generated[1]) >= NUM_CASES, said
