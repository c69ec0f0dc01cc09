"""How far two engines' answers are apart, from answers that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberline.llm import LLM, Completion
from emberline.types import FinishReason, SpeculationStats, TokenLogprobs

import record
from gpu import exactness
from gpu.exactness import Noise, Sameness, answer, rescored
from support.offline import offline


def completion(ids: list[int], logprobs: list[float]) -> Completion:
    records = tuple(
        TokenLogprobs(i, value, 1, (i, 99), (value, value - 1.0))
        for i, value in zip(ids, logprobs, strict=True)
    )
    return Completion(
        "", tuple(ids), records, None, FinishReason.LENGTH, None, None, 1, SpeculationStats()
    )


def test_the_same_answers() -> None:
    one = completion([5, 6], [-0.5, -0.25])
    found = Sameness.of([one], [one])
    assert (found.same, found.tokens, found.max_diff, found.first_differences) == (1, 2, 0.0, ())


def test_where_answers_part() -> None:
    one = completion([5, 6, 7], [-0.5, -0.25, -9.0])
    other = completion([5, 8, 7], [-0.5001, -3.0, -1.0])
    found = Sameness.of([one, one], [other, one])
    assert (found.prompts, found.same, found.tokens) == (2, 1, 4)
    assert found.max_diff == pytest.approx(1e-4)
    [note] = found.first_differences
    assert "prompt 0 at token 1: 6, not 8; the best two are 1.000000 apart" in note


def test_an_answer_that_goes_on() -> None:
    found = Sameness.of([completion([5], [-1.0])], [completion([5, 6], [-1.0, -1.0])])
    assert found.same == 0
    assert "1 tokens long" in found.first_differences[0]


def test_noise_is_of_all_tokens() -> None:
    assert Noise.of([0.0, 1.0, 0.25, 0.75]) == Noise(4, 0.5, 0.5, 1.0)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    return offline(monkeypatch)[0]


def test_an_engine_rescored_by_itself_is_exact(llm: LLM) -> None:
    prompts = [(5, 6, 7), (8, 9)]
    found = answer(llm, prompts, 6)
    differences = rescored(llm, prompts, found)
    assert len(differences) == sum(len(one.token_ids) for one in found)
    assert max(differences) < 1e-5


def test_both_halves_are_written(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Folder:
        path = tmp_path

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(exactness, "LLM", lambda *_: llm)
    monkeypatch.setattr(exactness, "resolve_model", lambda _: Folder)
    monkeypatch.setattr(exactness, "load_tokenizer", lambda _: llm.tokenizer)
    (tmp_path / "ids.jsonl").write_text("[5, 6, 7]\n[8, 9]\n[10]\n")
    flags = ["--device", "cpu", "--count", "2", "--tokens", "4"]
    exactness.main([*flags, "--prompts", str(tmp_path / "ids.jsonl")])
    found = json.loads((tmp_path / "gpu-exactness.json").read_text())
    assert found["float32_vs_cpu"]["same"] == found["prompts"] == 2
    assert found["bfloat16_vs_float32"]["max"] < 1e-5
    assert "2 of 2 answers are the CPU's" in capsys.readouterr().out
