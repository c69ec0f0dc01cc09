"""From a model's folder and the settings to a target that runs.

Owns the choice between the two paths: the fused decoder for its families, transformers' own
modelling code for everything else. Must not know drafts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from emberline.batch import KVSpec
from emberline.config import EngineConfig, TargetBackend
from emberline.models.decoder import Decoder
from emberline.models.decoder_config import SUPPORTED_MODEL_TYPES, DecoderConfig
from emberline.models.stock import StockTarget
from emberline.models.stock_load import check_against_plain, load_stock
from emberline.models.target import Target
from emberline.models.weights import ModelError, load_folder, read_json


def resolve_backend(folder: Path, wanted: TargetBackend) -> TargetBackend:
    """What runs the model in `folder`: "fused" or "stock"."""
    if wanted != "auto":
        return wanted
    kind = read_json(folder / "config.json").get("model_type")
    return "fused" if kind in SUPPORTED_MODEL_TYPES else "stock"


def build_target(
    folder: Path, config: EngineConfig, dtype: torch.dtype, num_pages: int, taps: tuple[int, ...]
) -> Target:
    """The target in `folder`, with KV of `num_pages` pages.

    Args:
        folder: a Hugging Face folder.
        config: the engine's settings.
        dtype: of weights, KV and computation.
        num_pages: pages of the KV, the scratch page 0 included.
        taps: layers whose output a draft reads.

    Raises:
        ModelError: the model is not understood, or the KV does not fit the machine.
        MemoryError, torch.OutOfMemoryError: there is not enough memory for it.
    """
    page_size, limit = config.cache.page_size, config.scheduler.max_model_len
    num_slots = num_pages * page_size
    if resolve_backend(folder, config.target_backend) == "fused":
        decoder = DecoderConfig.from_hf(read_json(folder / "config.json"))
        check_kv_fits([decoder.kv_spec], num_slots, dtype, config.device)
        return Decoder.load(
            decoder,
            load_folder(folder),
            dtype=dtype,
            device=config.device,
            taps=taps,
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=limit,
            poison_padding=config.poison_padding,
        )
    stock = load_stock(folder, dtype=dtype, device=config.device, max_model_len=limit)
    check_kv_fits(stock.kv_specs, num_slots, dtype, config.device)
    target = StockTarget(
        stock,
        taps=taps,
        num_pages=num_pages,
        page_size=page_size,
        poison_padding=config.poison_padding,
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
