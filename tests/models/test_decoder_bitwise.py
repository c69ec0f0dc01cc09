"""The same tokens get the same bits, whatever else was in the step."""

from __future__ import annotations

import pytest
import torch

CUTS: dict[str, list[int]] = {
    "singles over a boundary": [120, *[1] * 20, 240, *[1] * 20, 200],
    "blocks of 8": [8] * 75,
    "chunks of 16 and 100": [16] * 25 + [100, 100],
    "odd": [3, 5, 1, 77, 129, 7, 2, 66, 11, 90, 209],
}
VARIANTS = {
    "llama": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen3": ("qwen3", {"head_dim": 16, "num_key_value_heads": 4}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_cuts_batches_and_layouts(name, dtype, reference, driver) -> None:
    model_type, changes = VARIANTS[name]
    decoder = reference(model_type, max_position_embeddings=1024, **changes).decoder(
        dtype, taps=(2,), num_pages=200
    )
    torch.manual_seed(1)
    tokens, *others = torch.randint(0, 97, (4, 600))
    (want,), (want_taps,) = driver(decoder, [tokens], 16).run([[512], [88]])
    for cut in CUTS.values():
        (got,), (taps,) = driver(decoder, [tokens], 16).run([[n] for n in cut])
        assert torch.equal(got, want)
        assert torch.equal(taps, want_taps)
    batched = driver(decoder, [tokens, *others], 16, kind="static")
    steps = [[380, 100, 0, 30], [1, 8, 200, 3], [8, 1, 1, 1], [3, 8, 8, 8], [208, 1, 2, 20]]
    got = batched.run(steps)[0][0]
    assert torch.equal(got, want)


def test_head_does_not_see_the_row_count(reference) -> None:
    decoder = reference("llama").decoder(torch.float32)
    torch.manual_seed(0)
    hidden = torch.randn(40, 64)
    want = decoder.head(hidden)
    for count in (1, 2, 3, 7, 8, 9, 33):
        assert torch.equal(decoder.head(hidden[:count]), want[:count])
