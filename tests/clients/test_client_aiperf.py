"""aiperf: the acceptance that it reports is the acceptance that the server counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.documented import with_option
from support.program import Program

HERE = Path(__file__).parent
NUM_REQUESTS = 10  # of the page's command
COUNTERS = {
    "total_spec_decode_steps": "vllm:spec_decode_num_drafts_total",
    "total_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "total_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
}


def counts(server: Program) -> dict[str, int]:
    return {name: server.counter(counter) for name, counter in COUNTERS.items()}


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.timeout(900)
def test_acceptance_is_what_the_server_counted(
    kind: str,
    drafted: Program,
    model_folder: Path,
    documented: Callable[..., list[list[str]]],
    run_client: Callable[..., str],
    tmp_path: Path,
) -> None:
    items = map(json.loads, (HERE / "two_choices.jsonl").read_text().splitlines())
    prompts = [{"text": f"{item['question']} Explain."} for item in items][:NUM_REQUESTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
    (tmp_path / "tokenizer").symlink_to(model_folder)
    (command,) = documented("aiperf", drafted)
    before = counts(drafted)
    printed = run_client(
        *with_option(command, "--endpoint-type", kind),
        *("--ui", "none", "--workers-max", "1", "--no-gpu-telemetry", "--artifact-dir", "out"),
        cwd=tmp_path,
        offline=False,  # told to be, it takes no folder for a tokenizer
    )
    counted = {name: count - before[name] for name, count in counts(drafted).items()}
    assert counted["total_spec_decode_steps"] > 0
    report: dict[str, Any] = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    records = [
        json.loads(line)["spec_decode_acceptance"]
        for line in (tmp_path / "out/profile_export.jsonl").read_text().splitlines()
    ]
    assert len(records) == NUM_REQUESTS
    for name, field in (
        ("total_spec_decode_steps", "num_spec_steps"),
        ("total_accepted_draft_tokens", "num_accepted_draft_tokens"),
        ("total_draft_tokens", "num_draft_tokens"),
    ):
        assert sum(record[field] for record in records) == counted[name]
    steps, accepted = counted["total_spec_decode_steps"], counted["total_accepted_draft_tokens"]
    overall = report["spec_decode_token_weighted_acceptance_length"]["avg"]
    assert overall == pytest.approx(1 + accepted / steps, rel=1e-6)
    rate = report["spec_decode_overall_draft_acceptance_rate"]["avg"]
    assert rate == pytest.approx(100 * accepted / counted["total_draft_tokens"], rel=1e-6)
    histogram = report["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == steps
    assert sum(int(j) * count for j, count in histogram.items()) == accepted
    assert "Spec Decode" in printed
