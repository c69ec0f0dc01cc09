"""Training for targets of any family: features, losses under a cap, a draft from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.utils import logging

from emberline.config import CacheConfig, EngineConfig, SpeculationConfig
from emberline.engine.build import build_engine
from emberline.models.weights import ModelError
from emberline.train.acceptance import measure
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import Role, TokenRows
from emberline.train.export import read_draft, target_tables, write_full
from emberline.train.frozen import load_frozen, target_logits
from emberline.train.objectives import Mix, fused_loss
from emberline.train.stock_target import StockFrozenTarget
from emberline.train.target import FrozenTarget, is_fast, soft_capped
from emberline.train.trainer import CHECKPOINT, Trainer
from emberline.types import Request, SamplingParams

from support.engines import run
from support.tiny_models import save_model
from support.trained import load_model, write_compact

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(
                int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma2",
        "gemma3",
        "gemma4",
        "phi3",
        "granite",
        "cohere2",
        "gpt-oss",
        "qwen3-moe",
        "afmoe",
        "jetmoe",
    ],
)
def test_features_are_the_models_own(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    target = StockFrozenTarget(tmp_path, CPU)
    tokens = torch.randint(3, 97, (3, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(tokens, use_cache=False, output_hidden_states=True)
    taps, last = target.features(tokens, (-1, 0, 2))
    states = torch.cat([want.hidden_states[at] for at in (0, 1, 3)], dim=-1)
    torch.testing.assert_close(taps, states, rtol=1e-4, atol=1e-4)
    logits = target_logits(target, last.flatten(0, 1)).view_as(want.logits)
    torch.testing.assert_close(logits, want.logits, rtol=0, atol=1e-4)
    other, _ = target.features(tokens, (1,))
    torch.testing.assert_close(other, want.hidden_states[2], rtol=1e-4, atol=1e-4)


def test_the_faster_form_is_taken_where_it_is_whole(tmp_path: Path) -> None:
    save_model(tmp_path / "llama", "llama")
    save_model(tmp_path / "olmo2", "olmo2")
    assert isinstance(load_frozen(tmp_path / "llama", CPU), FrozenTarget)
    assert isinstance(load_frozen(tmp_path / "olmo2", CPU), StockFrozenTarget)
    assert is_fast({"model_type": "qwen2", "sliding_window": 99, "use_sliding_window": False})
    for odd in ({"sliding_window": 9}, {"mlp_bias": True}, {"rope_scaling": {"type": "linear"}}):
        assert not is_fast({"model_type": "llama", **odd})
    save_model(tmp_path / "lfm2", "lfm2", layer_types=["conv", "full_attention"] * 2)
    with pytest.raises(ModelError, match="layer 0"):
        load_frozen(tmp_path / "lfm2", CPU)


def test_losses_under_a_cap_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, latent, w2 = random(7, 6), random(7, 3), random(11, 3)
    head, states, labels = random(11, 6), random(7, 6), torch.arange(7)
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    ours = [x.clone().requires_grad_() for x in (hidden, latent, w2)]
    loss, *_ = fused_loss(*ours, head, states, labels, weights, Mix(0.3, 0.9), chunk=3, cap=2.0)
    loss.backward()
    theirs = [x.clone().requires_grad_() for x in (hidden, latent, w2)]
    draft = soft_capped(theirs[0] @ head.T, 2.0) + theirs[1] @ theirs[2].T
    q, p = torch.softmax(draft, -1), torch.softmax(soft_capped(states @ head.T, 2.0), -1)
    rows = torch.nn.functional.cross_entropy(draft, labels, reduction="none")
    want = (weights * (0.3 * rows + 0.9 * (p - q).abs().sum(-1))).sum()
    want.backward()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=1e-6)
    for ours_, theirs_ in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_.grad, theirs_.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "granite", "gemma4"])
def test_a_draft_from_target_to_exact_text(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", family)
    target = load_frozen(tmp_path / "model", CPU)
    prompts = [[5, first, 7] for first in range(10, 18)]
    tokens = torch.tensor([prompt + greedy(model, prompt, 29) for prompt in prompts])
    roles = torch.full_like(tokens, int(Role.ANSWER)).to(torch.uint8)
    rows = TokenRows(tokens.int(), roles)
    draft = DraftConfig.for_target(
        target.config, mask_token_id=3, block_size=4, num_hidden_layers=1, markov_rank=8
    )
    assert draft.final_logit_softcapping == target.logit_cap
    config = TrainConfig(steps=40, seqs_per_step=4, anchors=8)
    trainer = Trainer(target, draft, config, rows, None, tmp_path)
    trainer.run()
    shape, tensors = read_draft(tmp_path / CHECKPOINT)
    assert shape == draft
    tables = target_tables(tmp_path / "model", draft)
    assert torch.equal(tables[0], target.embedding)
    assert torch.equal(tables[1], target.head)
    write_full(tmp_path / "full", draft, tensors, *tables)
    write_compact(tmp_path / "int8", draft, tensors)
    assert load_file(tmp_path / "full" / "model.safetensors")["lm_head.weight"].shape == (97, 64)
    for form in ("full", "int8"):
        engine = build_engine(
            tmp_path / "model",
            tmp_path / form,
            EngineConfig(
                dtype="float32",
                threads=1,
                cache=CacheConfig(num_tokens=512),
                speculation=SpeculationConfig(planner="verify_all"),
            ),
            eos_ids=frozenset(),
        )
        params = SamplingParams(temperature=0, max_tokens=22)
        chosen = prompts[:4]
        answers = run(engine, [Request(str(i), tuple(p), params) for i, p in enumerate(chosen)])
        for number in range(4):
            assert answers[str(number)].token_ids == tokens[number, 3:25].tolist()
        # Drafts as training sees them: embedding, head, cap and taps are the same in serving.
        trained = load_model(draft, read_draft(tmp_path / form)[1])
        begun = [tokens[number, :4].tolist() for number in range(4)]  # the prefill emits a token
        found = measure(target, trained, begun, 21, 0.0, stop_ids=())
        assert engine.snapshot().num_verify_steps == sum(result.steps for result in found)
        assert sum(result.steps for result in found) < 0.9 * 4 * 21
