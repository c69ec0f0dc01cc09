"""A decoder made of the fused ops gives the numbers of `Decoder`: the ops fit together."""

from __future__ import annotations

import pytest
import torch

from emberline.batch import ForwardBatch
from emberline.layout import TokenLayout, Tokens
from emberline.models.decoder import Decoder
from emberline.models.decoder_config import DecoderConfig
from emberline.ops import gated, norm, paged_attention, place_qkv
from emberline.ops.paged_attention import PagedContext
from emberline.ops.triton import gated as fast_gated
from emberline.ops.triton import norm as fast_norm
from emberline.ops.triton import paged_attention as fast_attention
from emberline.ops.triton import place_qkv as fast_place

from support.triton_kernels import DEVICE

PAGE = 16
OPS = {
    "plain": (norm, place_qkv, paged_attention, gated),
    "triton": (fast_norm, fast_place, fast_attention, fast_gated),
}
VARIANTS = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
}


def step(counts: list[int], lens: list[int], table: torch.Tensor) -> ForwardBatch:
    """The last `counts` of the tokens that each request has, all of them scored."""
    query_lens = torch.tensor(counts, device=DEVICE)
    total = sum(counts)
    layout = TokenLayout.build(query_lens, query_lens, num_tokens=total, num_scored=total)
    positions = torch.cat([torch.arange(n - c, n) for c, n in zip(counts, lens, strict=True)])
    positions = positions.to(DEVICE)
    page = table[layout.req_of_token, positions // PAGE]
    return ForwardBatch(
        layout,
        Tokens(torch.randint(0, 97, (total,)).to(DEVICE)),
        Tokens(positions),
        Tokens(page * PAGE + positions % PAGE),
        table,
        torch.tensor(lens, device=DEVICE),
    )


def fused_forward(decoder: Decoder, batch: ForwardBatch, ops: str) -> torch.Tensor:
    """[T, V] logits."""
    norms, place, attention, gate = OPS[ops]
    config, starts = decoder.config, batch.layout.query_start_loc
    eps, most = config.rms_norm_eps, int(starts.diff().max())
    context = PagedContext(batch.seq_lens, batch.page_table, PAGE)
    cos, sin = decoder._rope.cos_sin(batch.positions, decoder.dtype)
    x, update = decoder.embed(batch.token_ids), None
    for index, layer in enumerate(decoder._layers):
        pool = decoder.kv_pool.keys[index], decoder.kv_pool.values[index]
        x, normed = norms.add_rms_norm(x, update, layer.input_norm, eps)
        q = place.place_qkv(
            layer.qkv(normed), cos, sin, *pool, batch.slot_mapping, norm=layer.qk_norm, eps=eps
        )
        window = layer.sliding_window
        mixed = attention.paged_attention(
            q, *pool, context, starts, most, scale=config.head_dim**-0.5, sliding_window=window
        )
        x, normed = norms.add_rms_norm(x, layer.out(mixed), layer.post_norm, eps)
        update = layer.down(gate.gated(layer.gate_up(normed)))
    return decoder.head(norms.add_rms_norm(x, update, decoder._norm, eps)[1])


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("family", VARIANTS)
def test_the_ops_make_the_decoder(family, ops, reference) -> None:
    torch.manual_seed(0)
    model = reference(family, num_hidden_layers=2, **VARIANTS[family])
    decoder = Decoder.load(
        DecoderConfig.from_hf(model.raw_config), model.weights(), dtype=torch.float32,
        device=DEVICE, taps=(), num_pages=5, page_size=PAGE,
    )  # fmt: skip
    table = torch.arange(1, 5, device=DEVICE).view(2, 2)
    for counts, lens in (([6, 2], [6, 2]), ([1, 3], [7, 5]), ([11], [18])):
        batch = step(counts, lens, table[: len(lens)])
        want = decoder.forward(batch).logits
        kept = decoder.kv_pool.keys.clone(), decoder.kv_pool.values.clone()
        for pool in (decoder.kv_pool.keys, decoder.kv_pool.values):
            pool.view(len(pool), -1, PAGE, *pool.shape[2:])[:, 0] = float("nan")  # scratch
        got = fused_forward(decoder, batch, ops)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        pools = decoder.kv_pool.keys, decoder.kv_pool.values
        for ours, theirs in zip(pools, kept, strict=True):
            torch.testing.assert_close(ours[:, PAGE:], theirs[:, PAGE:], rtol=1e-5, atol=2e-5)
            ours[:, :PAGE] = 0
