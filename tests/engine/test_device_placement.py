"""What an engine on a GPU keeps where, without a GPU: nothing of one device meets the other's."""

from __future__ import annotations

import json

import pytest
import torch

from emberline.engine.device_runner import DeviceRunner
from emberline.types import Request, SamplingParams

from support import on_device
from support.engines import run
from support.on_device import GOLDEN, golden_engine
from support.pretended_gpu import pretended_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
[PROMPT, *_] = (
    t["prompt_ids"] for t in json.loads((GOLDEN / "vanilla/trace.json").read_text())["traces"]
)
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 3, "max_tokens": 4, "ignore_eos": True}
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {**GREEDY, "logprobs": 2},
    "seeded": SEEDED,
    "rejection": {**SEEDED, "accept": "rejection"},
    "prompt scored": {**GREEDY, "prompt_logprobs": 2, "logprobs": 1, "logprob_token_ids": (3, 4)},
    "only scored": {"max_tokens": 0, "prompt_logprobs": 0},
    "whole vocabulary": {**GREEDY, "logprobs": -1},
    "both, annotated": {**SEEDED, "logprobs": 2, "logprobs_mode": "both", "annotations": True},
    "processed": {**SEEDED, "logprobs": 2, "logprobs_mode": "processed", "top_k": 5},
    "filters": {**SEEDED, "top_p": 0.8, "min_p": 0.05},
    "penalties": {**SEEDED, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {**SEEDED, "logit_bias": {3: 2.0, 7: -100.0}, "min_tokens": 2, "ignore_eos": False},
    "bans": {**SEEDED, "allowed_token_ids": tuple(range(40)), "bad_words": ((3,), (4, 5))},
}


def requests() -> list[Request]:
    return [
        Request(name, tuple(PROMPT[: 9 + place]), SamplingParams(**options))  # type: ignore[arg-type]
        for place, (name, options) in enumerate(OPTIONS.items())
    ]


@pytest.mark.parametrize("draft", ["vanilla", "eagle3"])
def test_every_option_stays_on_its_device(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(golden_engine(draft, on_device=False), requests())
    monkeypatch.setattr(on_device, "DEVICE", "cuda:0")
    monkeypatch.setattr(on_device, "triton_kernels", on_device.plain_kernels)
    if draft == "eagle3":  # drafts on the host: every step is a plain one
        monkeypatch.setattr(on_device, "make_runner", lambda *_, **__: None)
    with pretended_gpu():
        engine = golden_engine(draft, on_device=True)
        assert engine.parts.history.is_cuda
        got = run(engine, requests())
    assert isinstance(engine.runner, DeviceRunner) == (draft == "vanilla")
    for name, answer in expected.items():
        assert got[name].token_ids == answer.token_ids, name
        assert len(got[name].logprobs) == len(answer.logprobs)
