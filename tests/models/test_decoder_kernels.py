"""The decoder's forward that never waits for the host gives the numbers of the CPU's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emberline.batch import ForwardBatch
from emberline.layout import TokenLayout, Tokens
from emberline.models.decoder import Decoder
from emberline.models.decoder_config import DecoderConfig
from emberline.models.weights import ModelError
from emberline.ops.kernels import Kernels, plain_kernels

from support.no_waiting import no_waiting

TAPS = (-1, 0, 2)
PAGE = 16
VARIANTS = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen2-mixed": {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4, "hidden_act": "gelu_pytorch_tanh"},
}  # fmt: skip
STEPS = [[6, 20, 1], [1, 8, 8], [5, 0, 3], [1, 1, 1]]
LENGTHS = [sum(step[i] for step in STEPS) for i in range(3)]


def pair(reference, variant: str, kernels: Kernels, **options: object) -> tuple[Decoder, Decoder]:
    """The CPU's own decoder, and the same with kernels."""
    model = reference(variant.split("-")[0], **VARIANTS[variant])
    own, fast = (
        model.decoder(torch.float32, TAPS, num_pages=9, page_size=PAGE, kernels=k, **options)
        for k in (None, kernels)
    )
    return own, fast


def spoil_scratch(decoder: Decoder) -> None:
    """Page 0 is nobody's: whatever padding left there must not be read."""
    for pool in (decoder.kv_pool.keys, decoder.kv_pool.values):
        pool[:, :PAGE] = float("nan")


@pytest.mark.parametrize("kind", ["compact", "static"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_give_the_decoder(reference, driver, variant: str, kind: str) -> None:
    decoders = pair(reference, variant, plain_kernels())
    sequences = [torch.randint(0, 97, (n,)) for n in LENGTHS]
    spoil_scratch(decoders[1])
    results = []
    for decoder in decoders:
        torch.manual_seed(1)  # of the pages
        results.append(driver(decoder, sequences, PAGE, kind).run(STEPS))
    (logits, taps), (fast_logits, fast_taps) = results
    for ours, theirs in zip(fast_logits + fast_taps, logits + taps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    for ours, theirs in zip(fast_logits, logits, strict=True):
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    for name in ("keys", "values"):
        ours, theirs = (getattr(d.kv_pool, name)[:, PAGE:] for d in reversed(decoders))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def as_bucket(batch: ForwardBatch, num_reqs: int, num_tokens: int, num_rows: int) -> ForwardBatch:
    """The same step in a larger bucket: what its tail holds belongs to no request."""
    layout = batch.layout
    spare = num_tokens - layout.num_tokens

    def longer(x: torch.Tensor, count: int, fill: int) -> torch.Tensor:
        return torch.cat((x, x.new_full((count, *x.shape[1:]), fill)))

    reqs = num_reqs - layout.num_reqs
    last_rows = torch.arange(num_rows - spare, num_rows)
    bucket = replace(
        layout,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_scored=num_tokens - 1,
        query_start_loc=longer(layout.query_start_loc, reqs, layout.num_tokens),
        scored_start_loc=longer(layout.scored_start_loc, reqs, layout.num_scored),
        window_lens=longer(layout.window_lens, reqs, 0),
        req_of_token=longer(layout.req_of_token, spare, -1),
        offset_of_token=longer(layout.offset_of_token, spare, 0),
        row_of_token=torch.cat((layout.row_of_token, last_rows)),
        token_of_scored=longer(layout.token_of_scored, num_tokens - 1 - layout.num_scored, 0),
    )
    return ForwardBatch(
        layout=bucket,
        token_ids=Tokens(longer(batch.token_ids, spare, 0)),
        positions=Tokens(longer(batch.positions, spare, 0)),
        slot_mapping=Tokens(torch.cat((batch.slot_mapping, torch.arange(spare) % PAGE))),
        page_table=longer(batch.page_table, reqs, 0),
        seq_lens=longer(batch.seq_lens, reqs, 0),
    )


@pytest.mark.parametrize("extra_rows", [0, 5])
def test_a_bucket_gives_its_live_tokens_the_same(reference, driver, extra_rows: int) -> None:
    _, fast = pair(reference, "qwen2-mixed", plain_kernels())
    drive = driver(fast, [torch.randint(0, 97, (n,)) for n in LENGTHS], PAGE)
    drive.step([6, 20, 1])
    for windows in ([1, 8, 8], [1, 2, 0]):
        batch = drive.batch([1, 8, 8], windows)
        want = fast.forward(batch)
        spoil_scratch(fast)
        got = fast.forward(as_bucket(batch, 4, 24, 24 + extra_rows))
        live, scored = batch.layout.num_tokens, batch.layout.num_scored
        torch.testing.assert_close(got.logits[:scored], want.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.taps[:live], want.taps, rtol=1e-5, atol=1e-5)
        assert got.logits.shape == (23, 97)


@pytest.mark.parametrize("kind", ["compact", "static"])
def test_the_host_never_waits(reference, driver, kind: str) -> None:
    own, fast = pair(reference, "qwen3", plain_kernels())
    batch = driver(own, [torch.randint(0, 97, (9,)), torch.arange(4)], PAGE, kind).batch([9, 4])
    with no_waiting():
        assert fast.forward(batch).logits.shape == (13, 97)
        with pytest.raises(AssertionError, match="waits"):
            own.forward(batch)


def test_logits_keep_the_model_s_dtype(reference, driver) -> None:
    model = reference("llama", torch.bfloat16)
    fast = model.decoder(torch.bfloat16, (0,), kernels=plain_kernels())
    own = model.decoder(torch.bfloat16, (0,))
    tokens = [torch.randint(0, 97, (40,))]
    ours, theirs = (driver(d, tokens, PAGE).step([40])[0][0] for d in (fast, own))
    assert ours.dtype == fast.head(torch.zeros(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), theirs, rtol=0.05, atol=0.05)
    nothing = TokenLayout.build(*torch.zeros(2, 0, dtype=torch.int64), num_tokens=0, num_scored=0)
    none = torch.zeros(0, dtype=torch.int64)
    empty = fast.forward(ForwardBatch(nothing, none, none, none, none[:, None], none))
    assert empty.logits.shape == (0, 97)
    assert empty.logits.dtype == torch.bfloat16


def test_an_activation_without_a_kernel_is_refused(reference) -> None:
    with pytest.raises(ModelError, match=r"hidden_act 'relu' has no kernel, only silu and gelu"):
        reference("llama", hidden_act="relu").decoder(torch.float32, kernels=plain_kernels())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_made_once_are_those_of_every_step(reference, dtype: torch.dtype) -> None:
    rope = DecoderConfig.from_hf(reference("llama", rope_theta=5e5).raw_config).rope
    positions = torch.tensor([0, 511, 7, 7, 300])
    for made_once, made_now in zip(
        rope.tabulate(512, dtype)[positions].unbind(1), rope.cos_sin(positions, dtype), strict=True
    ):
        assert torch.equal(made_once, made_now)
