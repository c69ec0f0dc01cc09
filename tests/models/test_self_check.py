"""The start-up check finds what it promises to find, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from emberline.models.self_check import check_row_invariance

PAGES = list(range(3, 3 + 26))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_pages_and_a_finite_result(dtype, reference) -> None:
    decoder = reference("qwen3", head_dim=16).decoder(dtype)
    found = check_row_invariance(decoder, PAGES)
    assert found.max_logit_diff < (1e-4 if dtype == torch.float32 else 0.5)
    assert not found.bitwise or found.max_logit_diff == 0.0
    assert not decoder.kv_pool.keys.any()
    assert not decoder.kv_pool.values.any()


def test_a_row_count_that_leaks_is_found(reference, monkeypatch) -> None:
    decoder = reference("llama").decoder(torch.float32)
    plain = decoder.head

    def leaky(hidden: torch.Tensor) -> torch.Tensor:
        return plain(hidden) + 1e-3 * (hidden.shape[0] == 1)

    monkeypatch.setattr(decoder, "head", leaky)
    found = check_row_invariance(decoder, PAGES)
    assert not found.bitwise
    assert found.max_logit_diff == pytest.approx(1e-3, abs=1e-5)


def test_short_contexts_and_too_few_pages(reference) -> None:
    decoder = reference("llama").decoder(torch.float32, max_model_len=64)
    assert check_row_invariance(decoder, PAGES).max_logit_diff < 1e-4
    with pytest.raises(ValueError, match="scratch"):
        check_row_invariance(decoder, PAGES[:2])


def test_the_figure_is_that_of_a_computed_context(reference, monkeypatch) -> None:
    """Noise in the pages makes much of rounding: it decides, but is not what users are told."""
    decoder = reference("llama").decoder(torch.float32)
    plain, forward = decoder.head, decoder.forward
    computed: list[bool] = []

    def noting(batch):  # type: ignore[no-untyped-def]
        computed.append(int(batch.positions.min()) == 0 and batch.layout.num_reqs == 1)
        return forward(batch)

    def leaky(hidden: torch.Tensor) -> torch.Tensor:
        return plain(hidden) + (1e-3 if any(computed) else 1.0) * (hidden.shape[0] == 1)

    monkeypatch.setattr(decoder, "forward", noting)
    monkeypatch.setattr(decoder, "head", leaky)
    found = check_row_invariance(decoder, PAGES)
    assert not found.bitwise
    assert found.max_logit_diff == pytest.approx(1e-3, abs=1e-5)
