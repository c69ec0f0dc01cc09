"""schemathesis on the server's own OpenAPI document: whatever it sends, nothing is a 500."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.program import Program, program

NUM_CASES = 2000
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate")


@pytest.fixture(scope="module")
def hurried(logs: Path) -> Iterator[Program]:
    """The default model; no request takes longer than a moment, however much it asks for."""
    options = ("--threads", "1", "--request-timeout", "0.5", "--max-queue", "16")
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
    run_client(
        *(*command, "--phases", "examples,coverage,fuzzing", "--seed", "1", "--warnings", "off"),
        *("--suppress-health-check", "all", "--generation-database", "none"),
        *("--report", "json", "--report-json-path", "report.json"),
        cwd=tmp_path,
        seconds=2400,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    cases = report["test_cases"]
    print(cases, report["valid_rates"])
    assert cases["generated"] >= NUM_CASES
    assert (cases["with_failures"], cases["errored"]) == (0, 0)
    assert report["operations"]["tested"] == report["operations"]["total"]
    for path in GENERATING:  # not every case may be a refusal
        rates = report["valid_rates"][f"POST {path}"].values()
        assert sum(rate["accepted"] for rate in rates) > 0, path
