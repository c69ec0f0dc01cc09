"""Drafts on disk: names, shapes, bounds, and that the folded tap scale changes nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from emberline.drafters.checkpoint import read_draft_config
from emberline.models.int8 import expand
from emberline.train.backbone import DraftModel
from emberline.train.blocks import dense_mask
from emberline.train.config import DraftConfig
from emberline.train.export import (
    checkpoint_tensors,
    compact,
    read_draft,
    target_tables,
    write_full,
)
from emberline.train.target import FrozenTarget

from support.trained import load_model, write_compact


def fresh_model(draft: DraftConfig, target: FrozenTarget) -> DraftModel:
    model = DraftModel(draft)
    model.initialise(target.embedding, seed=0)
    model.tap_scale.uniform_(0.01, 3.0)
    return model


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_full_folder_has_the_names_of_the_dialect(
    head: str, draft: DraftConfig, target: FrozenTarget, target_folder: Path, tmp_path: Path
):
    changes = {"markov_rank": 0} if head == "none" else {"markov_head_type": head}
    draft = dataclasses.replace(draft, **changes)
    tensors = checkpoint_tensors(fresh_model(draft, target).state_dict())
    write_full(tmp_path, draft, tensors, *target_tables(target_folder, draft))
    found = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    width, vocab, rank = draft.hidden_size, draft.vocab_size, draft.markov_rank
    expected = {
        "embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "fc.weight": (width, draft.tap_width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "confidence_head.proj.weight": (1, width + rank),
        "confidence_head.proj.bias": (1,),
    }
    if rank:
        expected["markov_head.markov_w1.weight"] = (vocab, rank)
        expected["markov_head.markov_w2.weight"] = (vocab, rank)
    if head == "gated":
        expected["markov_head.gate_proj.weight"] = (rank, width + rank)
        expected["markov_head.gate_proj.bias"] = (rank,)
    if head == "rnn":
        expected["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
        expected["markov_head.joint_proj.bias"] = (3 * rank,)
    assert {n: s for n, s in found.items() if not n.startswith("layers.")} == expected
    layer = {name.removeprefix("layers.0.") for name in found if name.startswith("layers.0.")}
    assert layer == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"self_attn.{n}_norm.weight" for n in "qk"),
        *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }
    config, back = read_draft(tmp_path)
    assert config == draft
    for name, tensor in tensors.items():
        torch.testing.assert_close(back[name], tensor, rtol=2**-8, atol=0)


def test_the_engine_reads_the_config(draft: DraftConfig, target: FrozenTarget, tmp_path: Path):
    write_compact(tmp_path, draft, checkpoint_tensors(fresh_model(draft, target).state_dict()))
    assert read_draft_config(tmp_path).taps == draft.target_layer_ids
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert raw["dflash_config"]["mask_token_id"] == raw["mask_token_id"] == 3


def test_compact_form_is_within_half_a_step(draft: DraftConfig, target: FrozenTarget):
    tensors = checkpoint_tensors(fresh_model(draft, target).state_dict())
    packed = compact({**tensors, "lm_head.weight": target.head})
    assert "lm_head.weight" not in packed
    back = expand(packed, "compact")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            assert packed[name].dtype == torch.int8
            scale = packed[name + "_scale"].float().repeat_interleave(64, dim=1)
            half = scale[:, : tensor.shape[1]] / 2
            assert ((back[name] - tensor).abs() <= half * 1.0001).all()
        else:
            assert torch.equal(back[name], tensor)


def test_folding_the_tap_scale_changes_no_output(draft: DraftConfig, target: FrozenTarget):
    model = fresh_model(draft, target)
    folded = load_model(draft, checkpoint_tensors(model.state_dict()))
    torch.manual_seed(0)
    taps, anchors = torch.randn(2, 20, draft.tap_width), torch.tensor([[3, 9], [0, 15]])
    block = torch.randn(2, 8, draft.hidden_size)
    positions = (anchors[..., None] + torch.arange(4)).flatten(1)
    inputs = (taps, block, positions, model.angles(24), dense_mask(anchors, 20, 4))
    torch.testing.assert_close(model(*inputs), folded(*inputs), rtol=1e-4, atol=1e-4)


def test_wrong_target_is_refused(draft: DraftConfig, target_folder: Path):
    with pytest.raises(ValueError, match="another target"):
        target_tables(target_folder, dataclasses.replace(draft, vocab_size=65))


def test_missing_draft_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="expected a checkpoint"):
        read_draft(tmp_path)


def test_shipped_draft_is_whole():
    from emberline.hub import ModelFolder, resolve_draft

    folder = resolve_draft(None, ModelFolder(Path(), "default", "default"))
    assert folder is not None
    config, tensors = read_draft(folder)
    assert (config.num_hidden_layers, config.markov_rank) == (4, 32)
    assert load_model(config, tensors).config.block_size == 7
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20e6
