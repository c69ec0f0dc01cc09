"""The trainer's target against transformers, and the cached step against the whole pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from emberline.train.acceptance import measure
from emberline.train.config import DraftConfig, TrainConfig
from emberline.train.dataset import TokenRows
from emberline.train.export import checkpoint_tensors
from emberline.train.target import FrozenTarget, Lockstep, wide_linear
from emberline.train.trainer import Trainer

from support.trained import load_model

SMALL = TrainConfig(steps=30, seqs_per_step=4, anchors=8)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_steps_match_transformers(family: str, tmp_path: Path):
    torch.manual_seed(0)
    config, model = FAMILIES[family]
    model(config(**SIZES)).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    target = FrozenTarget(tmp_path, torch.device("cpu"))
    tokens = torch.randint(0, 64, (3, 12))
    with torch.no_grad():
        expected = reference(tokens, output_hidden_states=True)
    taps, last = target.features(tokens, (-1, 0, 1))
    states = torch.cat(expected.hidden_states[:3], dim=-1)
    torch.testing.assert_close(taps, states, rtol=1e-4, atol=1e-4)
    logits = wide_linear(last.flatten(0, 1), target.head).view_as(expected.logits)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    lockstep = Lockstep(target, 3, 12)
    for position in range(12):
        step = lockstep.forward(tokens[:, position], position)
        torch.testing.assert_close(step, expected.logits[:, position], rtol=1e-3, atol=1e-3)


def test_other_families_are_refused(tmp_path: Path):
    sizes = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=16)
    GPT2LMHeadModel(sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gpt2' cannot be trained for"):
        FrozenTarget(tmp_path, torch.device("cpu"))


@pytest.mark.parametrize("trained", [False, True])
def test_greedy_speculation_writes_what_the_target_writes(
    trained: bool, target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    trainer = Trainer(target, draft, SMALL, rows, None, tmp_path)
    if trained:
        trainer.run()
    model = load_model(draft, checkpoint_tensors(trainer.model.state_dict()))
    prompts = [rows.tokens[index, : 3 + index].tolist() for index in range(4)]
    found = measure(target, model, prompts, 20, 0.0, stop_ids=())
    for index, result in enumerate(found):
        start = 3 + index
        assert list(result.output_ids) == rows.tokens[index, start : start + 20].tolist()
        assert result.emitted == 20
        assert result.accepted[0] <= result.reached[0] == result.steps


def test_sampled_speculation_follows_the_targets_law(
    target: FrozenTarget, draft: DraftConfig, rows: TokenRows, tmp_path: Path
):
    model = load_model(
        draft,
        checkpoint_tensors(Trainer(target, draft, SMALL, rows, None, tmp_path).model.state_dict()),
    )
    prompt = rows.tokens[0, :5].tolist()
    found = measure(target, model, [prompt] * 1500, 1, 1.0, stop_ids=())
    _, last = target.features(torch.tensor([prompt]), (0,))
    law = torch.softmax(wide_linear(last[0, -1:], target.head)[0], -1)
    counts = torch.bincount(torch.tensor([r.output_ids[0] for r in found]), minlength=64) / 1500
    assert float((counts - law).abs().sum()) < 0.15
