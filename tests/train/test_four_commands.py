"""From a target to a calibrated, measured, served draft: the four commands in one shell line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from emberline.config import EngineConfig, SpeculationConfig
from emberline.llm import LLM, load_engine
from emberline.types import SamplingParams
from emberline.verify.calibration import Calibration

from support.serving import serve
from support.tiny_chat import make_chat_target

LINE = """
{emberline} train synthesize data --model target --device cpu --rounds 1 --sample-batch 32 \
    --seq-len 192 --max-answer 48 --held-out 4 --threads 1 &&
{emberline} train run --model target --data data --device cpu --steps 150 --seqs 8 --anchors 12 \
    --layers 2 --block-size 4 --markov-rank 8 --taps 0,1,2 &&
{emberline} calibrate target --draft run/draft --limit 12 --max-tokens 40 --threads 1 &&
{emberline} eval target --draft run/draft --draft ngram --prompts asked.jsonl --max-tokens 40 \
    --threads 1 --json eval.json --markdown eval.md --plot eval.png
"""
PROMPTS = ["Hello", "What is 2 + 2?", "Write a poem", "Why?"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    make_chat_target(folder / "target", scale=0.4, hidden_size=32, context_len=1024)
    lines = [json.dumps({"turns": [text]}) for text in PROMPTS]
    (folder / "asked.jsonl").write_text("\n".join(lines))
    command = LINE.format(emberline=Path(sys.executable).with_name("emberline"))
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def llm(place: Path, draft: str) -> LLM:
    # Fixed blocks: nothing has to be measured before the first answer.
    config = EngineConfig(
        dtype="float32", threads=1, speculation=SpeculationConfig(planner="verify_all")
    )
    return LLM(str(place / "target"), draft, config, progress=False)


def test_every_command_leaves_what_it_is_for(place: Path) -> None:
    counts = json.loads((place / "data" / "synthesis.json").read_text())["counts"]
    assert counts["sampled"] == 32
    assert counts["held_out"] == 4
    assert load_file(place / "run" / "draft" / "model.safetensors")
    calibration = Calibration.load(place / "run" / "draft" / "calibration.json")
    assert len(calibration.temperatures) == 4
    assert (place / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert "| draft | asked | mean | over run |" in (place / "eval.md").read_text()
    said = json.loads((place / "eval.json").read_text())["drafts"]
    assert said["run"]["info"]["calibrated"] is True
    row = said["run"]["T=0"]["all"]
    assert row["prompts"] == len(PROMPTS)
    assert sum(row["accepted"]) > 0  # it has learnt something
    assert len(row["ece"]) == 4


def test_the_draft_serves_the_targets_own_text(place: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
    drafted, plain = (llm(place, draft) for draft in (str(place / "run" / "draft"), "none"))
    for text in PROMPTS:
        messages = [{"role": "user", "content": text}]
        with_draft, without = drafted.chat(messages, params), plain.chat(messages, params)
        assert with_draft.token_ids == without.token_ids
        assert with_draft.logprobs is not None
        assert without.logprobs is not None
        for one, other in zip(with_draft.logprobs, without.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert with_draft.stats.num_drafted > 0
    [choice] = plain.generate([plain.chat_ids([{"role": "user", "content": "Hello"}])], params)[0]
    config = EngineConfig(
        dtype="float32", threads=1, speculation=SpeculationConfig(planner="verify_all")
    )
    loaded = load_engine(
        str(place / "target"), str(place / "run" / "draft"), config, progress=False
    )
    with serve(loaded.engine, loaded.tokenizer) as server:
        [answer] = server.chat("Hello", max_tokens=40)["choices"]
    assert answer["message"]["content"] == choice.text
