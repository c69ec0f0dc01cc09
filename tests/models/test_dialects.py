"""Every dialect loads, and drafts exactly as the original; what is not understood is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.batch import KVSpec
from emberline.drafters import Drafter
from emberline.drafters.checkpoint import read_draft_config
from emberline.models.weights import ModelError

from support.drafter_world import (
    BLOCK,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    RANK,
    TAPS,
    TinyTarget,
    load,
)
from support.tiny_draft import (
    DFLASH,
    ZLAB,
    draft_config,
    draft_tensors,
    gemma4_config,
    same_drafts,
)


def plain(folder: Path, head: str | None = "vanilla") -> Drafter:
    """The draft that the dialects below spell, in DeepSpec's spelling."""
    changes = DFLASH if head is None else {}
    return load(folder, draft_config(**changes), draft_tensors(head))


@pytest.mark.parametrize("prefix", ["module.", "draft_model.", "module.model.", "model."])
def test_wrapper_prefixes_are_stripped(tmp_path: Path, prefix: str) -> None:
    named = {prefix + name: tensor for name, tensor in draft_tensors().items()}
    ours = load(tmp_path / "named", draft_config(), named)
    assert same_drafts(ours, plain(tmp_path / "plain"))


def test_specforge_config_and_legacy_names(tmp_path: Path) -> None:
    nested = ("target_layer_ids", "mask_token_id", "markov_rank", "enable_confidence_head")
    raw = draft_config()
    raw["dflash_config"] = {name: raw.pop(name) for name in nested} | {"projector_type": "dspark"}
    raw["architectures"] = ["DSparkDraftModel"]
    heads = ("markov_head", "confidence_head")
    named = {
        f"logit_head.{name}" if name.startswith(heads) else name: tensor
        for name, tensor in draft_tensors().items()
    }
    assert same_drafts(load(tmp_path / "specforge", raw, named), plain(tmp_path / "plain"))


def test_int8_tensors_are_dequantised(tmp_path: Path) -> None:
    packed, floats = draft_tensors(), draft_tensors()
    for name in ("fc.weight", "layers.1.mlp.down_proj.weight", "markov_head.markov_w2.weight"):
        scale = packed[name].abs().amax(1) / 127
        packed[name] = (packed[name] / scale[:, None]).round().to(torch.int8)
        packed[name + "_scale"] = scale
        floats[name] = packed[name].float() * scale[:, None]
    quantised = load(tmp_path / "int8", draft_config(), packed)
    assert same_drafts(quantised, load(tmp_path / "float", draft_config(), floats))


def test_own_embedding_and_head(tmp_path: Path) -> None:
    target, original = TinyTarget(), plain(tmp_path / "plain")
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.matrix}
    copied = load(tmp_path / "copied", draft_config(), {**draft_tensors(), **copies}, target)
    assert same_drafts(copied, original)
    # A copy is not kept: what drafts is the target's own.
    target.matrix = target.matrix.roll(1, 0)
    assert not same_drafts(copied, original)
    for name, tensor in copies.items():
        other = {name: tensor.roll(1, 0)}
        own = load(tmp_path / name, draft_config(), {**draft_tensors(), **other})
        assert not same_drafts(own, original)


def test_config_alone_tells_taps_block_and_kv(tmp_path: Path) -> None:
    load(tmp_path, draft_config(**ZLAB), draft_tensors(None))
    config = read_draft_config(tmp_path)
    assert config.taps == TAPS
    assert config.max_draft_tokens == BLOCK - 1
    assert config.kv_spec == KVSpec(LAYERS, KV_HEADS, HEAD_DIM)


CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown class": ({"architectures": ["BertModel"]}, "BertModel is not a draft"),
    "no class": ({"architectures": None}, "None is not a draft"),
    "gemma experts": (
        gemma4_config(keys_are_values=True, enable_moe_block=True),
        "enable_moe_block",
    ),
    "parallel eagle": ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
    "domino class": ({"architectures": ["DominoDraftModel"]}, "Domino"),
    "domino": ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
    "speculators": ({"speculators_model_type": "mtp"}, "speculators_model_type 'mtp'"),
    "deepseek": ({"dspark_block_size": 5}, "DeepSeek-V4"),
    "causal": ({"dflash_config": {"causal": True}}, "causal block"),
    "sliding": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    "sliding flag": (
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 64},
        "sliding-window",
    ),
    "sliding window alone": ({"layer_types": None, "sliding_window": 64}, "sliding_window 64"),
    "causal at the top": ({"causal": True}, "causal block"),
    "causal at the top only": (
        {"causal": True, "dflash_config": {"causal": False}},
        "causal block",
    ),
    "logit scale": ({"logit_scale": 0.25}, "logit_scale 0.25"),
    "logits scaling": ({"logits_scaling": 8.0}, "logits_scaling 8.0"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "confidence alone": (
        {"markov_rank": 0, "markov_head_type": None},
        "enable_confidence_head with markov_rank 0",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "growing rope": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "change with the length",
    ),
    "no rope": ({"rope_parameters": None}, "'rope_theta' is missing"),
    "no mask": ({"mask_token_id": None}, "'mask_token_id' is missing"),
    "no block": ({"block_size": None}, "'block_size' is missing"),
    "no taps": ({"target_layer_ids": []}, "rise strictly"),
    "unsorted taps": ({"target_layer_ids": [1, 1, 3]}, "rise strictly"),
    "taps too deep": ({"target_layer_ids": [0, 1, 4]}, "beyond 4 layers"),
    "block of one": (
        {"architectures": ["DFlashDraftModel"], "markov_rank": 0, "block_size": 0},
        "block_size must be at least 1, got 0",
    ),
    "other vocabulary": ({"vocab_size": 41}, "vocabulary"),
    "other width": ({"hidden_size": 16, "num_attention_heads": 2}, "hidden size of 16"),
    "other depth": ({"num_target_layers": 6}, "target of 6 layers, not of 4"),
    "fewer taps": ({"target_layer_ids": [1, 3]}, "do not fill fc.weight's 96 columns"),
    "head missing": ({}, "markov_head.markov_w1.weight' is missing"),
}


@pytest.mark.parametrize("case", CONFIG_REFUSALS)
def test_config_refusals_say_why(tmp_path: Path, case: str) -> None:
    changes, reason = CONFIG_REFUSALS[case]
    headless = case in ("head missing", "confidence alone")
    tensors = draft_tensors(None if headless else "vanilla")
    with pytest.raises(ModelError) as raised:
        load(tmp_path, draft_config(**changes), tensors)
    assert reason in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_a_window_that_is_not_used_is_harmless(tmp_path: Path) -> None:
    unused = {"sliding_window": 64, "use_sliding_window": False}
    for name, changes in {
        "flag": {**unused, "layer_types": None},
        "types": {"sliding_window": 64},
    }.items():
        drafter = load(tmp_path / name, draft_config(**changes), draft_tensors())
        assert same_drafts(drafter, plain(tmp_path / "plain"))


def test_taps_deeper_than_this_target(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="taps layer 5, the target has 4 layers"):
        load(
            tmp_path,
            draft_config(num_target_layers=None, target_layer_ids=[0, 1, 5]),
            draft_tensors(),
        )


TENSOR_REFUSALS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "left over": ({"extra.weight": torch.zeros(2)}, "extra.weight"),
    "reduced": (
        {"d2t": torch.zeros(20, dtype=torch.int64)},
        "'markov_head.markov_w2.weight' has shape [40, 8], the config asks for [20, 8]",
    ),
    "reduced head": ({"lm_head.weight": torch.zeros(20, HIDDEN)}, "20 rows of 40 tokens"),
    "candidate selector": (
        {"candidate_selector.hidden_projection.weight": torch.zeros(2, HIDDEN)},
        "not supported is DFlash 2",
    ),
    "gru": ({"prefix_gru.weight_ih_l0": torch.zeros(2, HIDDEN)}, "not supported is Domino"),
    "inside the target": ({"mtp.0.main_norm.weight": torch.zeros(HIDDEN)}, "DeepSeek-V4"),
    "w1 rows": ({"markov_head.markov_w1.weight": torch.zeros(41, RANK)}, "vocabulary of 41"),
    "misshapen": ({"norm.weight": torch.zeros(HIDDEN + 1)}, "'norm.weight' has shape"),
    "confidence": ({"confidence_head.proj.weight": torch.zeros(1, 7)}, "confidence_head"),
    "no scale": ({"fc.weight": torch.zeros(HIDDEN, 96, dtype=torch.int8)}, "needs its scales"),
    "twice": ({"model.norm.weight": torch.zeros(HIDDEN)}, "two tensors are called 'norm.weight'"),
}


@pytest.mark.parametrize("case", TENSOR_REFUSALS)
def test_tensor_refusals_say_why(tmp_path: Path, case: str) -> None:
    changes, reason = TENSOR_REFUSALS[case]
    with pytest.raises(ModelError) as raised:
        load(tmp_path, draft_config(), {**draft_tensors(), **changes})
    assert reason in str(raised.value)
