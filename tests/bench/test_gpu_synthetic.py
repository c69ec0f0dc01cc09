"""Random models of a given shape, acceptance by a script, and what is measured of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from emberline.engine.engine import Engine
from emberline.types import Request, SamplingParams
from emberline.verify.planner import VerifyAll

import record
from gpu import synthetic
from gpu.random_models import SHAPES
from gpu.scripted import Script

PROMPT = (7, 8, 9, 10)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return synthetic.load(SHAPES["tiny"], "cpu", "float32", 4, 120, "threshold")


def run(engine: Engine, count: int = 24, seed: int = 0, *, speculate: bool) -> tuple[int, ...]:
    params = SamplingParams(
        temperature=0, max_tokens=count, seed=seed, speculate=speculate, ignore_eos=True
    )
    engine.add(Request("r", PROMPT, params))
    ids: tuple[int, ...] = ()
    while engine.has_work:
        for output in engine.step():
            ids += output.token_ids
    return ids


def test_the_engine_says_the_script_drafted_or_not(engine: Engine) -> None:
    script = Script(SHAPES["tiny"].vocab)
    wanted = script.tokens(torch.arange(len(PROMPT), len(PROMPT) + 24)).tolist()
    before = engine.snapshot()
    assert list(run(engine, speculate=False)) == wanted
    assert engine.snapshot().num_draft_tokens == before.num_draft_tokens
    assert list(run(engine, speculate=True)) == wanted


def test_confidences_are_the_chances_of_acceptance(engine: Engine) -> None:
    planner, name = engine.parts.planner, str(engine.info["planner"])
    engine.use_planner(VerifyAll(), "verify_all")
    before = engine.snapshot()
    for seed in range(12):
        run(engine, 100, seed, speculate=True)
    after = engine.snapshot()
    engine.use_planner(planner, name)
    first = after.accepted_per_pos[0] - before.accepted_per_pos[0]
    steps = after.num_verify_steps - before.num_verify_steps
    assert first / steps == pytest.approx(0.7, abs=0.08)  # least 0.4, evenly up to 1


def test_a_draft_is_right_as_often_as_its_chance_says() -> None:
    script = Script(1000)
    seeds, positions = torch.arange(400), torch.full((400,), 17)
    ids, chances = script.block(seeds, positions, 7)
    right = ids == script.tokens(positions[:, None] + torch.arange(1, 8))
    assert float(right.float().mean()) == pytest.approx(float(chances.mean()), abs=0.03)
    sure = chances > 0.85
    assert float(right[sure].float().mean()) > 0.82
    assert float(right[chances < 0.55].float().mean()) < 0.6
    assert 0.4 <= float(chances.min()) < 0.5
    assert 0.9 < float(chances.max()) < 1.0
    again, _ = script.block(seeds, positions, 7)
    assert torch.equal(ids, again)


def test_weights_of_a_step_are_the_models() -> None:
    # Qwen3-8B: 8.19 billion parameters, of which a step reads all but the input embedding.
    assert SHAPES["8B"].step_numbers == pytest.approx(8.19e9 - 151_936 * 4096, rel=0.01)
    assert SHAPES["135M"].step_numbers == 134_515_008


def test_everything_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    flags = "--shape tiny --device cpu --dtype float32 --requests 1 3 --context 20 --repeats 1"
    synthetic.main([*flags.split(), "--new-tokens", "6", "--reps", "1", "--planner", "threshold"])
    found = json.loads((tmp_path / "gpu-synthetic.json").read_text())
    sizes = [(row["requests"], row["tokens"]) for row in found["target"]]
    assert sizes == [(n, n * q) for n in (1, 3) for q in (1, 2, 4, 8)]
    assert found["draft"] == []
    assert {row["draft"] for row in found["policies"]} == {
        "none",
        "verify_all",
        "threshold 0.5",
        "scheduled",
    }
    assert set(found["scheduled"]) == {"1", "3"}
    assert "written:" in capsys.readouterr().out


def test_a_part_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(synthetic, "target_rows", lambda *_: 1 // 0)
    flags = "--shape tiny --device cpu --dtype float32 --requests 1 --new-tokens 4 --reps 1"
    synthetic.main([*flags.split(), "--planner", "threshold"])
    found = json.loads((tmp_path / "gpu-synthetic.json").read_text())
    assert "target" not in found
    assert found["policies"]
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_ratios_are_over_the_best_fixed_policy() -> None:
    rates = {"none": 10.0, "verify_all": 8.0, "threshold 0.5": 12.0, "scheduled": 12.0}
    rows = [{"concurrency": 4, "draft": name, "tok_s": rate} for name, rate in rates.items()]
    ratios = synthetic.scheduled_ratios(rows)
    assert ratios == {"4": {"over_best": 1.0, "over_verify_all": 1.5}}
