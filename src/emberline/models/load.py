"""From a model's folder to a model that runs over pages.

Owns the choice between the two paths: the fused decoder for its families, transformers' own
modelling code for everything else. Must not know drafts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from emberline.batch import KVSpec
from emberline.config import TargetBackend
from emberline.models.decoder import Decoder
from emberline.models.decoder_config import SUPPORTED_MODEL_TYPES, DecoderConfig
from emberline.models.target import Target
from emberline.models.weights import ModelError, load_folder, read_json
from emberline.ops.kernels import Kernels


def resolve_backend(folder: Path, wanted: TargetBackend) -> TargetBackend:
    """What runs the model in `folder`: "fused" or "stock".

    Raises:
        ModelError: the fused decoder is wanted for a family that it does not have.
    """
    kind = read_json(folder / "config.json").get("model_type")
    if kind in SUPPORTED_MODEL_TYPES:
        return "fused" if wanted == "auto" else wanted
    if wanted == "fused":
        families = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ModelError(
            f"target_backend fused runs {families}, but this model is a {kind!r}: leave it out, or "
            "say stock"
        )
    return "stock"


def load_target(
    folder: Path,
    backend: TargetBackend = "auto",
    *,
    dtype: torch.dtype,
    device: str,
    num_pages: int,
    page_size: int,
    taps: tuple[int, ...] = (),
    max_model_len: int | None = None,
    poison_padding: bool = False,
    kernels: Kernels | None = None,
) -> Target:
    """The model in `folder`, with KV of `num_pages` pages.

    Args:
        folder: a Hugging Face folder.
        backend: what runs it.
        dtype: of weights, KV and computation.
        device: torch device.
        num_pages: pages of the KV, the scratch page 0 included.
        page_size: tokens a page.
        taps: layers whose output a draft reads.
        max_model_len: most tokens a sequence may have; None for what the checkpoint allows.
        poison_padding: padding rows hold NaN instead of zero.
        kernels: what the fused decoder runs with; None for the CPU's own path. Transformers'
            modelling code brings its own.

    Raises:
        ModelError: the model is not understood, or the KV does not fit the machine.
        MemoryError, torch.OutOfMemoryError: there is not enough memory for it.
    """
    num_slots = num_pages * page_size
    if resolve_backend(folder, backend) == "fused":
        decoder = DecoderConfig.from_hf(read_json(folder / "config.json"))
        check_kv_fits([decoder.kv_spec], num_slots, dtype, device)
        return Decoder.load(
            decoder,
            load_folder(folder),
            dtype=dtype,
            device=device,
            taps=taps,
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=max_model_len,
            poison_padding=poison_padding,
            kernels=kernels,
        )
    # Transformers' modelling code takes a second or two to import, which our own does without.
    from emberline.models.stock import StockTarget
    from emberline.models.stock_load import check_against_plain, load_stock

    stock = load_stock(folder, dtype=dtype, device=device, max_model_len=max_model_len)
    check_kv_fits(stock.kv_specs, num_slots, dtype, device)
    target = StockTarget(
        stock,
        taps=taps,
        num_pages=num_pages,
        page_size=page_size,
        poison_padding=poison_padding,
    )
    check_against_plain(target)
    return target


def check_kv_fits(specs: Sequence[KVSpec], num_slots: int, dtype: torch.dtype, device: str) -> None:
    """Raise `ModelError` for a KV cache that would be larger than a CPU's whole memory.

    Its memory is taken only as it fills: without this check the machine would give out much later.
    """
    per_token = sum(spec.numbers_per_token for spec in specs) * dtype.itemsize
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return
    if device == "cpu" and num_slots * per_token > memory:
        raise ModelError(
            f"a KV cache of {num_slots} tokens takes {num_slots * per_token / 1e9:.1f} GB, and the "
            f"machine has {memory / 1e9:.1f} GB: lower --kv-tokens (CacheConfig.num_tokens) to "
            f"well under {memory // per_token}"
        )
