"""An EAGLE-3 draft that the trainer writes is the one that the engine drafts with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from emberline.config import EngineConfig
from emberline.engine.build import build_engine
from emberline.train.acceptance import measure
from emberline.train.export import read_draft, write_full
from emberline.train.target import FrozenTarget
from emberline.types import Request, SamplingParams

from support.engines import run
from support.trained import load_model, write_compact

GOLDEN = Path(__file__).parents[1] / "golden"
COUNT = 32


@pytest.mark.parametrize("form", ["full", "compact"])
def test_the_engine_takes_the_steps_that_the_trainer_counts(form: str, tmp_path: Path) -> None:
    target = FrozenTarget(GOLDEN / "target", torch.device("cpu"))
    config, tensors = read_draft(GOLDEN / "eagle3")
    if form == "full":
        write_full(tmp_path, config, tensors, target.embedding, target.head)
    else:
        write_compact(tmp_path, config, tensors)
    traces = json.loads((GOLDEN / "eagle3" / "trace.json").read_text())["traces"][:3]
    # The engine draws the first token with the prompt; the trainer's loop begins with a block.
    begun = [trace["prompt_ids"] + trace["output_ids"][:1] for trace in traces]
    counted = measure(target, load_model(*read_draft(tmp_path)), begun, COUNT - 1, 0.0, ())
    engine = build_engine(
        GOLDEN / "target", tmp_path, EngineConfig(dtype="float32"), eos_ids=frozenset()
    )
    params = SamplingParams(temperature=0, max_tokens=COUNT)
    requests = [Request(str(i), tuple(t["prompt_ids"]), params) for i, t in enumerate(traces)]
    answers = run(engine, requests)
    for i, (trace, trained) in enumerate(zip(traces, counted, strict=True)):
        answer = answers[str(i)]
        assert answer.token_ids == trace["output_ids"][:COUNT]
        assert answer.token_ids[1:] == list(trained.output_ids)
        assert answer.last.stats.num_steps == trained.steps
        assert answer.last.stats.num_accepted > 0
