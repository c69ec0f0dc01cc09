"""Settings with a value for every default: of the device, and of the memory that it has.

Owns what a GPU's memory is shared out to. Must not know how models run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from emberline.batch import KVSpec
from emberline.config import BY_DEVICE, CPU_KV_TOKENS, EngineConfig
from emberline.drafters.checkpoint import read_draft_config
from emberline.drafters.standalone import StandaloneConfig
from emberline.engine.scoring import most_scored
from emberline.models.decoder_config import DecoderConfig
from emberline.models.device import resolve_device, resolve_dtype
from emberline.models.load import resolve_backend
from emberline.models.weights import ModelError, load_folder, read_json

WORK_BYTES = 2**30
"""Of the libraries, the graphs and the steps' small tensors, roughly."""
NUMBERS_A_LOGIT = 3
"""What a step holds of each logit at a time, in float32: the target's, the draft's q, a copy."""
NUMBERS_A_SCORED_LOGIT = 2
"""The same of a scored prompt's: the target's, in its own dtype and in float32."""
NUMBERS_A_ROW = 16
"""What a step holds of each token beside its logits, in hidden widths: a wide layer's."""


def resolve_config(config: EngineConfig) -> EngineConfig:
    """The settings on the device that they name, as `EngineConfig.on` has them.

    Raises:
        ModelError: there is no such device here, or a setting is out of range on it.
    """
    try:
        return config.on(resolve_device(config.device))
    except ValueError as problem:
        raise ModelError(str(problem)) from problem


def size_cache(config: EngineConfig, model: Path, draft: Path | None) -> EngineConfig:
    """Resolved settings with the KV tokens that the GPU has room for, where none are given.

    `gpu_memory` of what is free, less the weights and the work of the largest step; never more
    than all requests at their longest. A model that the fused decoder does not run says how large
    its KV is only once it is loaded: it gets as much as on a CPU.

    Raises:
        ModelError: nothing is left for a cache.
    """
    if config.cache.num_tokens is not BY_DEVICE:
        return config
    if resolve_backend(model, config.target_backend) != "fused":
        return _with_tokens(config, CPU_KV_TOKENS)
    dtype = resolve_dtype(config.dtype, config.device)
    decoder = DecoderConfig.from_hf(read_json(model / "config.json"))
    specs, weights = [decoder.kv_spec], num_weights(model)
    if draft is not None:
        specs.append(_draft_spec(draft, config, decoder.kv_spec.num_layers))
        weights += num_weights(draft)
    limits = config.scheduler
    drawn = limits.max_num_reqs + limits.max_verify_tokens
    scored = most_scored(decoder.vocab_size, torch.device(config.device))
    rows = NUMBERS_A_LOGIT * drawn + NUMBERS_A_SCORED_LOGIT * min(scored, limits.max_num_tokens)
    work = WORK_BYTES + 4 * rows * decoder.vocab_size
    work += NUMBERS_A_ROW * limits.max_num_tokens * decoder.hidden_size * dtype.itemsize
    with torch.cuda.device(config.device):
        free, _ = torch.cuda.mem_get_info()
    room = int(config.cache.gpu_memory * free) - weights * dtype.itemsize - work
    longest = limits.max_model_len or decoder.context_len
    a_token = sum(spec.numbers_per_token for spec in specs) * dtype.itemsize
    tokens = min(room // a_token, limits.max_num_reqs * longest)
    if tokens < config.cache.page_size:
        raise ModelError(
            f"gpu_memory {config.cache.gpu_memory} of {free / 1e9:.1f} GB free leaves no room for "
            f"a KV cache beside {weights * dtype.itemsize / 1e9:.1f} GB of weights and "
            f"{work / 1e9:.1f} GB to work in: raise it, or lower --max-num-reqs"
        )
    return _with_tokens(config, tokens // config.cache.page_size * config.cache.page_size)


def num_weights(path: Path) -> int:
    """Numbers in a model's or a draft's files. Of a GGUF file, at most as many."""
    if path.is_file():
        return 2 * path.stat().st_size  # four bits each are the fewest in use
    weights = load_folder(path)  # memory-mapped: nothing is read but the heads of the files
    return sum(weights.take(name).numel() for name in weights.names())


def _draft_spec(draft: Path, config: EngineConfig, depth: int) -> KVSpec:
    found = read_draft_config(draft, config.speculation.draft_slot_rule, depth)
    if isinstance(found, StandaloneConfig):
        return DecoderConfig.from_hf(read_json(draft / "config.json")).kv_spec
    return found.kv_spec


def _with_tokens(config: EngineConfig, num_tokens: int) -> EngineConfig:
    return replace(config, cache=replace(config.cache, num_tokens=num_tokens))
