"""The stock path refuses by name what it does not understand; what a draft gets of a target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging

from emberline.models.stock import StockTarget
from emberline.models.stock_attention import STEP, Call, window_of_mask
from emberline.models.stock_load import check_against_plain, load_stock
from emberline.models.weights import ModelError

from support.tiny_models import EXPERTS, save_model


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def load(folder: Path, taps: tuple[int, ...] = (), **options: Any) -> StockTarget:
    stock = load_stock(folder, dtype=torch.float32, device="cpu", **options)
    target = StockTarget(stock, taps=taps, num_pages=9, page_size=16)
    check_against_plain(target)
    return target


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, r"layer 0.*\(conv\)"),
    "linear attention": (
        "qwen3_next",
        {"num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS, **LINEAR},
        r"layer 0.*\(linear_attention\)",
    ),
    "chunks": (
        "llama4_text",
        {"num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 96},
        "neither causal nor a sliding window",
    ),
    "both directions": ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
    "attention of its own": ("bloom", {"head_dim": None}, "layer 0 of BloomForCausalLM"),
    "keywords that are dropped": ("stablelm", {}, "not handed the keywords"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_architectures(case: str, tmp_path: Path) -> None:
    family, fields, message = REFUSED[case]
    save_model(tmp_path, family, **fields)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_state_beside_attention(tmp_path: Path) -> None:
    """Nothing in the calls of attention tells of it: the comparison does."""
    save_model(tmp_path, "olmo2")
    stock = load_stock(tmp_path, dtype=torch.float32, device="cpu")
    target = StockTarget(stock, taps=(), num_pages=9, page_size=16)
    check_against_plain(target)
    stock.blocks[1].mlp.register_forward_hook(lambda _m, _a, out: out + 0.5 * out.roll(1, 1))
    with pytest.raises(ModelError, match="over pages is off its own logits by 0"):
        check_against_plain(target)


WRONG = {
    "one token": (lambda positions: positions == 20, "at positions 0 to 23"),
    "near the end of the context": (lambda positions: positions > 256, "at positions 488 to 511"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_at_some_positions(case: str, tmp_path: Path) -> None:
    where, message = WRONG[case]
    save_model(tmp_path, "olmo2")
    stock = load_stock(tmp_path, dtype=torch.float32, device="cpu")
    target = StockTarget(stock, taps=(), num_pages=9, page_size=16)

    def disturb(_module: Any, _args: Any, kwargs: dict[str, Any], out: torch.Tensor) -> Any:
        wrong = where(kwargs["position_ids"])[..., None] & (STEP in kwargs)
        return out + wrong * out.roll(1, -1)

    stock.blocks[-1].register_forward_hook(disturb, with_kwargs=True)
    with pytest.raises(ModelError, match=message):
        check_against_plain(target)


def test_damaged_weights_are_called_that(tmp_path: Path) -> None:
    model = save_model(tmp_path, "olmo2")
    model.lm_head.weight.data[5] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not finite"):
        load(tmp_path)


def test_a_model_with_an_eye_and_one_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}', encoding="utf-8")
    with pytest.raises(ModelError, match="'gemma3' has parts for other input than text"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    with pytest.raises(ModelError, match="'t5' has an encoder"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "emberling"}', encoding="utf-8")
    with pytest.raises(ModelError, match="transformers cannot load it"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1 missing keys"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "1 unexpected keys.*model.extra"),
    ],
)
def test_weights_of_another_model(change, message: str, tmp_path: Path) -> None:
    save_model(tmp_path, "olmo2")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_lengths(tmp_path: Path) -> None:
    save_model(tmp_path, "phi3-longrope")
    assert load(tmp_path).max_model_len == 256
    assert load(tmp_path, max_model_len=200).max_model_len == 200
    with pytest.raises(ModelError, match=r"past 256.*frequencies change"):
        load(tmp_path, max_model_len=257)
    save_model(tmp_path, "olmo2")
    with pytest.raises(ModelError, match="past the model's context of 512"):
        load(tmp_path, max_model_len=513)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    save_model(tmp_path, "olmo2", rope_parameters=rope)
    assert load(tmp_path).max_model_len == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.zeros(1)}, "'position_bias' is not understood"),
    ],
)
def test_arguments_of_attention(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Call.read(nn.Module(), 16, options)


def test_arguments_that_are_read() -> None:
    sinks = torch.zeros(4)
    options = {"dropout": 0.0, "scaling": 0.3, "sliding_window": 9, "softcap": 2.0, "s_aux": sinks}
    call = Call.read(
        nn.Module(), 16, {**options, "position_ids": sinks, "output_attentions": False}
    )
    assert (call.scale, call.window, call.soft_cap) == (0.3, 9, 2.0)
    assert call.sinks is sinks
    assert Call.read(nn.Module(), 16, {}).scale == 0.25


def test_windows_are_read_off_the_mask() -> None:
    def causal(_b, _h, q, k):
        return k <= q

    def sliding(_b, _h, q, k):
        return (k <= q) & (k > q - 5)

    def chunked(_b, _h, q, k):
        return (k <= q) & (k // 8 == q // 8)

    def both(_b, _h, q, k):
        return k <= q + 1

    assert window_of_mask(causal, 40) is None
    assert window_of_mask(sliding, 40) == 5
    assert window_of_mask(sliding, 4) is None
    for rule in (chunked, both):
        with pytest.raises(ModelError, match="neither causal nor a sliding window"):
            window_of_mask(rule, 40)


@pytest.mark.parametrize("family", ["gemma4", "granite", "cohere2", "mixtral", "opt"])
def test_the_head_scales_and_caps_as_the_model_does(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    target = load(tmp_path, taps=(0,))
    tokens = torch.randint(3, 97, (1, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        body = model.base_model(tokens, use_cache=False).last_hidden_state[0]
        want = model(tokens, use_cache=False).logits[0]
    torch.testing.assert_close(target.head(body), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(target.head(body[:3]), want[:3], rtol=0, atol=1e-5)
    assert torch.equal(target.embed(tokens), model.get_input_embeddings()(tokens))


def test_taps_that_are_no_layers(tmp_path: Path) -> None:
    save_model(tmp_path, "olmo2")
    with pytest.raises(ModelError, match=r"tap 4 is not a layer: -1 \.\. 3"):
        load(tmp_path, taps=(4,))


def test_gemma4_keeps_a_pool_a_shape_and_shared_keys_once(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma4")
    target = load(tmp_path)
    assert [tuple(pool.keys.shape) for pool in target.kv_pools] == [
        (1, 144, 2, 16),
        (1, 144, 1, 32),
    ]
    assert [layer.source for layer in target.layers] == [0, 1, 0, 1]
    assert target.kv_spec.num_layers == 4
    assert not any(pool.keys.any() or pool.values.any() for pool in target.kv_pools)
