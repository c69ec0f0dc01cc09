"""Engines over transformers' own modelling code: the text and the logprobs that it would give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.engine.build import build_engine
from emberline.engine.engine import Engine
from emberline.models.weights import ModelError
from emberline.types import Request, SamplingParams

from support.engines import Answer, run
from support.tiny_models import save_draft, save_model

LENGTH = 24
PROMPTS = tuple(
    tuple(torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    for n in (5, 45, 21)
)
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def _quiet_and_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    torch.set_num_threads(before)


def build(
    folder: Path,
    draft: Path | None = None,
    *,
    num_tokens: int = 1024,
    prefix_cache: bool = True,
    prefill_chunk: int = 16,
    **options: Any,
) -> Engine:
    config = EngineConfig(
        dtype="float32",
        threads=1,
        cache=CacheConfig(num_tokens=num_tokens, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(max_num_reqs=3, prefill_chunk=prefill_chunk, max_model_len=128),
        speculation=SpeculationConfig(planner="verify_all"),
        poison_padding=True,
        **options,
    )
    return build_engine(folder, draft, config, eos_ids=frozenset({2}))


def plain(model: Any, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs, a whole forward pass each."""
    tokens, logprobs = list(prompt), []
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        row = torch.log_softmax(logits, -1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return tokens[len(prompt) :], logprobs


def ask(engine: Engine, predictions: dict[int, list[int]] | None = None) -> list[Answer]:
    predictions = predictions or {}
    requests = [
        Request(str(i), prompt, GREEDY, prediction=tuple(predictions.get(i, ())))
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = run(engine, requests)
    return [answers[str(i)] for i in range(len(PROMPTS))]


def assert_same(answers: list[Answer], expected: list[tuple[list[int], list[float]]]) -> None:
    for answer, (tokens, logprobs) in zip(answers, expected, strict=True):
        assert answer.token_ids == tokens
        got = [record.logprob for record in answer.logprobs]
        assert got == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gemma3", "gemma4", "phi3", "granite", "cohere2", "gpt-oss", "mixtral", "olmo2"],
)
def test_greedy_text_and_logprobs_with_drafts(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", family)
    save_draft(tmp_path / "draft", model, taps=(-1, 1, 2))
    engine = build(tmp_path / "model", tmp_path / "draft")
    assert engine.info["target_backend"] == "stock"
    expected = [plain(model, prompt) for prompt in PROMPTS]
    # One request drafts with the random draft, the others mostly with what they will say.
    predictions = {i: list(expected[i][0]) for i in (0, 1)}
    predictions[1][10] = predictions[1][11] = 5
    answers = ask(engine, predictions)
    assert_same(answers, expected)
    assert answers[0].last.stats.num_accepted > LENGTH / 2
    assert answers[2].last.stats.num_drafted > LENGTH / 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_both_backends_of_a_family_agree(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    expected = [plain(model, prompt) for prompt in PROMPTS]
    for backend, found in (("auto", "fused"), ("fused", "fused"), ("stock", "stock")):
        engine = build(tmp_path, target_backend=backend)
        assert engine.info["target_backend"] == found
        assert_same(ask(engine), expected)


@pytest.mark.parametrize("family", ["phi3", "gemma3"])
def test_windows_preemption_and_the_prefix_cache(family: str, tmp_path: Path) -> None:
    """All layers slide in the one, some in the other: pages behind a window go, or stay."""
    model = save_model(tmp_path, family)
    expected = [plain(model, prompt) for prompt in PROMPTS]
    small = build(tmp_path, num_tokens=112)
    assert_same(ask(small), expected)
    assert_same(ask(small), expected)
    assert small.snapshot().prefix_hit_tokens > 0
    crowded = build(tmp_path, num_tokens=64 if family == "phi3" else 96, prefix_cache=False)
    assert_same(ask(crowded), expected)
    slides = family == "phi3"
    assert (small.parts.target.kv_spec.window is not None) == slides
    assert small.snapshot().num_preemptions + crowded.snapshot().num_preemptions > 0


def test_what_is_refused_is_named(tmp_path: Path) -> None:
    save_model(tmp_path / "lfm2", "lfm2", layer_types=["conv", "full_attention"] * 2)
    with pytest.raises(ModelError, match=r"layer 0 of Lfm2ForCausalLM \(conv\)"):
        build(tmp_path / "lfm2")
    save_model(tmp_path / "gemma3", "gemma3")
    with pytest.raises(ModelError, match=r"fused runs llama.*'gemma3_text'"):
        build(tmp_path / "gemma3", target_backend="fused")
    with pytest.raises(ValueError, match="target_backend must be auto, fused or stock"):
        EngineConfig(target_backend="other")  # type: ignore[arg-type]
