"""The decoder on Triton's kernels gives the numbers of the CPU's own path."""

from __future__ import annotations

import pytest
import torch

from emberline.batch import ForwardBatch
from emberline.layout import TokenLayout, Tokens
from emberline.models.decoder import Decoder
from emberline.models.decoder_config import DecoderConfig
from emberline.ops.kernels import triton_kernels

from support.triton_kernels import DEVICE, exact_products

__all__ = ["exact_products"]
PAGE = 16
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


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("family", VARIANTS)
def test_the_kernels_make_the_decoder(family, fixed_order, reference) -> None:
    torch.manual_seed(0)
    model = reference(family, num_hidden_layers=2, **VARIANTS[family])
    own, fast = (
        Decoder.load(
            DecoderConfig.from_hf(model.raw_config), model.weights(), dtype=torch.float32,
            device=DEVICE, taps=(-1, 1), num_pages=5, page_size=PAGE, kernels=kernels,
        )
        for kernels in (None, triton_kernels(fixed_order=fixed_order))
    )  # fmt: skip
    table = torch.arange(1, 5, device=DEVICE).view(2, 2)
    for pool in (fast.kv_pool.keys, fast.kv_pool.values):
        pool[:, :PAGE] = float("nan")  # scratch
    for counts, lens in (([6, 2], [6, 2]), ([1, 3], [7, 5]), ([11], [18])):
        batch = step(counts, lens, table[: len(lens)])
        want, got = own.forward(batch), fast.forward(batch)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(got.taps, want.taps, rtol=1e-5, atol=2e-5)
        assert torch.equal(got.logits.argmax(-1), want.logits.argmax(-1))
        for name in ("keys", "values"):
            ours, theirs = (getattr(d.kv_pool, name)[:, PAGE:] for d in (fast, own))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("exact_products")
def test_fixed_order_gives_a_request_the_same_bits_in_any_step(reference) -> None:
    """Alone, beside another, and token by token."""
    torch.manual_seed(0)
    model = reference("llama", num_hidden_layers=1)
    decoder = Decoder.load(
        DecoderConfig.from_hf(model.raw_config), model.weights(), dtype=torch.float32,
        device=DEVICE, taps=(), num_pages=5, page_size=PAGE,
        kernels=triton_kernels(fixed_order=True),
    )  # fmt: skip
    table = torch.arange(1, 5, device=DEVICE).view(2, 2)
    together = step([5, 17], [5, 17], table)
    want = decoder.forward(together).logits[:5]
    alone = step([5], [5], table[:1])
    one_by_one = [step([1], [n + 1], table[:1]) for n in range(5)]
    alone.token_ids.copy_(together.token_ids[:5])
    for n, single in enumerate(one_by_one):
        single.token_ids.copy_(together.token_ids[n : n + 1])
    assert torch.equal(decoder.forward(alone).logits, want)
    assert torch.equal(torch.cat([decoder.forward(s).logits for s in one_by_one]), want)
