"""The decode benchmark of a whole engine, over an engine that runs no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from emberline.llm import LLM

from gpu import workload
from gpu.decode import measure, table
from gpu.workload import NO_DRAFT, SCHEDULED, VERIFY_ALL, Bench, Cell, generate_ids, generate_text
from support.offline import offline

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    llm, loaded = offline(monkeypatch)
    loaded.engine.info["planner"] = "verify_all"
    return Bench(llm.engine, generate_text(llm), PROMPTS, 8)


def test_a_cell_counts_what_ran(bench: Bench) -> None:
    drafted = bench.run(Cell(2, VERIFY_ALL, 0))
    plain = bench.run(Cell(2, NO_DRAFT, 0))
    assert drafted.tokens == plain.tokens == 4 * 2 * 8  # four calls of two make eight prompts
    assert plain.drafts == 0
    assert drafted.drafts > 0
    assert drafted.steps < plain.steps
    assert drafted.emitted > drafted.block_steps
    assert drafted.rate == drafted.tokens / drafted.seconds


def test_without_text_the_same_steps_run(bench: Bench) -> None:
    bare = Bench(bench.engine, generate_ids(bench.engine), PROMPTS, 8)
    one, other = (b.run(Cell(4, VERIFY_ALL, 0)) for b in (bench, bare))
    assert (one.tokens, one.drafts, one.steps) == (other.tokens, other.drafts, other.steps)


def test_cells_become_rows_and_lines(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell(2, NO_DRAFT, 0), Cell(2, SCHEDULED, 0), Cell(2, SCHEDULED, 3)]
    rows = measure(bench, cells, reps=3, drafts=bench.engine.max_draft_tokens)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == rows
    assert [(row["draft"], row["logprobs"]) for row in rows] == [
        (NO_DRAFT, 0),
        (SCHEDULED, 0),
        (SCHEDULED, 3),
    ]
    assert all(len(row["tok_s_all"]) == 3 for row in rows)
    assert "acceptance_length" not in rows[0]
    assert rows[1]["acceptance_length"] > 1
    assert 0 < rows[1]["budget_share"] <= 1
    text = table(rows).splitlines()
    assert len(text) == 4
    assert text[1].split()[4] == "1.000"  # of none


def test_a_cell_that_fails_leaves_the_others(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    width = 10**9  # of alternatives: refused
    rows = measure(bench, [Cell(1, NO_DRAFT, width), Cell(1, NO_DRAFT, 0)], reps=1, drafts=1)
    assert [row["logprobs"] for row in rows] == [0]
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "logprobs" in said[0]["error"]
    assert said[0]["logprobs"] == width


def test_planners_are_those_of_the_policies(bench: Bench) -> None:
    engine = bench.engine
    scheduled = engine.parts.planner
    for policy, name in (
        (VERIFY_ALL, "verify_all"),
        ("threshold 0.5", "threshold"),
        (SCHEDULED, engine.info["planner"]),
    ):
        bench.run(Cell(8, policy, 0), 2)
        assert engine.info["planner"] == name
    assert engine.parts.planner is scheduled


def test_prompts_come_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm: LLM = offline(monkeypatch)[0]
    path = tmp_path / "ids.jsonl"
    path.write_text("[1, 2]\n[3]\n")
    assert workload.read_prompts(path, llm.tokenizer) == [(1, 2), (3,)]
    path.write_text('[1, 2]\n{"ids": [3]}\n')
    with pytest.raises(SystemExit, match=r"line 2 of ids\.jsonl"):
        workload.read_prompts(path, llm.tokenizer)


def test_settings_hold_every_request() -> None:
    config = workload.settings("cpu", "float32", 300, 500)
    assert config.scheduler.max_num_reqs == 300
    assert config.cache.num_tokens >= 300 * 500
    assert config.scheduler.max_num_tokens >= 300


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="no CUDA GPU is visible"):
        workload.settings("cuda", "bfloat16", 1, 100)


def test_random_prompts_are_the_same_every_time() -> None:
    one, two = (workload.random_prompts(3, 5, 200) for _ in range(2))
    assert one == two
    assert len({*one}) == 3
    assert all(2 <= i < 200 for row in one for i in row)


def test_the_age_of_this_process() -> None:
    assert 0 < workload.seconds_alive() < 24 * 3600
