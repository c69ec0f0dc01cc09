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


def test_nothing_is_a_server_error(
    hurried: Program, run_client: Callable[..., str], tmp_path: Path
) -> None:
    said = run_client(
        *("st", "run", f"{hurried.url}/openapi.json", "--checks", "not_a_server_error"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "150", "--seed", "1"),
        *("--suppress-health-check", "all", "--generation-database", "none", "--warnings", "off"),
        cwd=tmp_path,
        seconds=1500,
    )
    generated = re.search(r"(\d+) generated", said)
    assert generated, said
    assert int(generated[1]) >= NUM_CASES, said
    assert re.search(r"\b(\d+) passed", said), said
