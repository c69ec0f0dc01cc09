"""transformers' models over our pages against transformers itself, however a sequence is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from emberline.models.stock import StockTarget
from emberline.models.stock_load import check_against_plain, load_stock

from support.tiny_models import FAMILIES, save_model

TAPS = (2, -1, 0, 3)
LENGTHS = (150, 21, 40)  # windows are 12 and 20 tokens
# Chunks of every kind share steps: prefill, single tokens, verify-like blocks.
STEPS = [(100, 1, 0), (1, 8, 3), (26, 1, 20), (1, 1, 1), (8, 8, 1), (0, 2, 15), (14, 0, 0)]


@pytest.fixture(autouse=True)
def _no_bars() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@contextmanager
def layer_outputs(model) -> Iterator[dict[int, torch.Tensor]]:
    """What goes into the first layer (-1) and comes out of each."""
    body = model.model.decoder if hasattr(model.model, "decoder") else model.model
    caught: dict[int, torch.Tensor] = {}

    def keep(index: int):
        def hook(_module, _args, output) -> None:
            caught[index] = (output if torch.is_tensor(output) else output[0])[0]

        return hook

    def first(_module, args, kwargs) -> None:
        caught[-1] = (args[0] if args else kwargs["hidden_states"])[0]

    hooks = [body.layers[0].register_forward_pre_hook(first, with_kwargs=True)]
    hooks += [layer.register_forward_hook(keep(i)) for i, layer in enumerate(body.layers)]
    yield caught
    for hook in hooks:
        hook.remove()


def load(folder: Path, taps: tuple[int, ...] = (), **options) -> StockTarget:
    stock = load_stock(folder, dtype=torch.float32, device="cpu", **options)
    target = StockTarget(stock, taps=taps, num_pages=65, page_size=16, poison_padding=True)
    check_against_plain(target)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_in_mixed_steps(family: str, tmp_path: Path, driver) -> None:
    model = save_model(tmp_path, family)
    target = load(tmp_path, TAPS)
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(0, 97, (n,), generator=generator) for n in LENGTHS]
    want = []
    for tokens in sequences:
        with torch.no_grad(), layer_outputs(model) as caught:
            logits = model(tokens[None], use_cache=False).logits[0]
        want.append((logits, torch.cat([caught[tap] for tap in TAPS], dim=-1)))
    for kind in ("compact", "static"):
        got, taps = driver(target, sequences, 16, kind=kind).run(STEPS)
        for logits, tapped, (want_logits, want_taps) in zip(got, taps, want, strict=True):
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, want_logits, rtol=0, atol=1e-4)
            torch.testing.assert_close(tapped, want_taps, rtol=1e-5, atol=1e-4)
