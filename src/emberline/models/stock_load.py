"""From a model folder to a transformers model that can run over our pages, or a reason why not.

Owns what is refused before and after loading. Whatever the config says, two things decide: the
survey of the attention calls, and a comparison of a short text, cut into steps, with the model's
own attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emberline.models.self_check import Scratch
from emberline.models.stock import StockModel, StockTarget
from emberline.models.stock_attention import STEP, plain_attention, survey
from emberline.models.stock_parts import find_blocks
from emberline.models.weights import ModelError

CHECK_TOKENS = 24
CHECK_CUTS = (15, 1, 8)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the median token's largest logit error, as a share of its largest logit. Wrong attention is
off by the order of 1."""
FURTHER = 5.0
"""Times the tolerance that a single token may be off: rounding may change an expert."""


def load_stock(
    folder: Path, *, dtype: torch.dtype, device: str, max_model_len: int | None = None
) -> StockModel:
    """Load the model in `folder` for the stock path.

    Args:
        folder: a Hugging Face folder of a model that transformers knows.
        dtype: of weights and computation.
        device: torch device.
        max_model_len: most tokens a sequence may have; None for what the checkpoint allows.

    Raises:
        ModelError: the model cannot run over pages, or the files are not whole.
    """
    config = read_config(folder)
    context_len = _context_len(config)
    limit = _model_len(config, context_len, max_model_len)
    model = load_whole(folder, dtype, device, attn_implementation=STEP)
    layers = survey(model, context_len)
    return StockModel(model, layers, find_blocks(model, len(layers)), limit)


def check_against_plain(target: StockTarget) -> None:
    """Compare a short text in three steps with transformers' own attention on the whole of it.

    It is done from position 0 on, and again with the last positions that a sequence may have:
    rotary angles, tables of positions and temperatures by position are looked at there.

    Raises:
        ModelError: they disagree: something of this architecture is not carried by the pages.
    """
    page_size = target.kv_pools[0].page_size
    num_pages = 2 + CHECK_TOKENS // page_size
    pages = list(range(1, 1 + num_pages))
    room = (target.kv_pools[0].keys.shape[1] // page_size - 1) * page_size
    if min(room, target.max_model_len) < CHECK_TOKENS or room < num_pages * page_size:
        return
    scratch = Scratch(target, pages)
    try:
        for first in sorted({0, target.max_model_len - CHECK_TOKENS}):
            _compare(target, scratch, first)
    finally:
        for pool in target.kv_pools:
            pool.clear(pages)


def _compare(target: StockTarget, scratch: Scratch, first: int) -> None:
    """The comparison with tokens at positions `first` and on, and nothing before them."""
    want = plain_logits(target.model, scratch.tokens[:CHECK_TOKENS], first)
    got, start = [], 0
    with torch.no_grad():
        for count in CHECK_CUTS:
            got.append(scratch.run(start, count, scored=count, shift=first))
            start += count
    if not bool(want.isfinite().all()):
        raise ModelError("the model's logits are not finite: its weights are damaged, or overflow")
    error = (torch.cat(got) - want).abs().amax(-1) / want.abs().amax(-1).clamp_min(1e-6)
    error = error.nan_to_num(torch.inf)
    # The first step has seen no pages yet: it would hide in the median what pages do.
    median, most = float(error[CHECK_CUTS[0] :].median()), float(error.max())
    tolerance = TOLERANCE.get(target.dtype, TOLERANCE[torch.bfloat16])
    if median > tolerance or most > FURTHER * tolerance:
        raise ModelError(
            f"{type(target.model).__name__} over pages is off its own logits by {most:.3g} of the "
            f"largest (of the median token {median:.3g}) at positions {first} to "
            f"{first + CHECK_TOKENS - 1}: it keeps context elsewhere than in attention"
        )


def plain_logits(model: Any, token_ids: Tensor, first: int = 0) -> Tensor:
    """[n, V] float32 logits of a sequence [n] by transformers' own attention, without a cache.

    Its positions are `first` and on.
    """
    positions = torch.arange(first, first + len(token_ids), device=token_ids.device)
    with torch.no_grad(), plain_attention(model):
        out = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    logits: Tensor = out.logits[0]
    return logits.float()


def read_config(folder: Path) -> Any:
    """The model's config as transformers completes it.

    Raises:
        ModelError: it cannot be read, or is of a kind that no decoder here can be.
    """
    from transformers import AutoConfig

    with _quiet(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"{folder}: model_type {kind!r} has an encoder, which is not supported")
    if config.get_text_config() is not config:
        raise ModelError(
            f"{folder}: model_type {kind!r} has parts for other input than text, which are not "
            "supported: save its text model in a folder of its own"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{folder}: quantization_config is not supported: give plain weights")
    return config


def _context_len(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelError(
            f"config of {config.model_type} has no max_position_embeddings, so that nothing says "
            "how long a sequence may be"
        )
    return length


def _model_len(config: Any, context_len: int, wanted: int | None) -> int:
    """The most tokens a sequence may have."""
    fixed = fixed_rope_len(config)
    if wanted is None:
        return min(context_len, fixed or context_len)
    if wanted < 1:
        raise ModelError(f"max_model_len must be at least 1, got {wanted}")
    if fixed is not None and wanted > fixed:
        raise ModelError(
            f"max_model_len {wanted} is past {fixed}, where this model's rotary frequencies change "
            "with the sequence's length: keys in the pages would be wrong"
        )
    if wanted > context_len:
        raise ModelError(
            f"max_model_len {wanted} is past the model's context of {context_len} tokens: use at "
            "most that"
        )
    return wanted


def fixed_rope_len(config: Any) -> int | None:
    """Tokens up to which rotary frequencies stay as they are; None: always.

    "dynamic" and "longrope" change theirs once a sequence outgrows the original context.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    lengths = []
    for part in by_layer:
        kind = str(part.get("rope_type", "default"))
        original = part.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if "dynamic" in kind:
            lengths.append(config.max_position_embeddings)
        elif kind == "longrope":
            lengths.append(original or config.max_position_embeddings)
    return min(lengths, default=None)


def load_whole(folder: Path, dtype: torch.dtype, device: str, **options: Any) -> Any:
    """The model as transformers has it, frozen, with all its weights and no others.

    Args:
        folder: a Hugging Face folder.
        dtype: of the weights.
        device: torch device.
        options: of `from_pretrained`.

    Raises:
        ModelError: it cannot be loaded, or the weights are of another model.
    """
    from transformers import AutoModelForCausalLM

    with _quiet(folder):
        model, notes = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, notes.get(what) or ())):
            raise ModelError(
                f"{folder}: the weights are not those of {type(model).__name__}: {len(found)} "
                f"{what.replace('_', ' ')}, the first is {found[0]}"
            )
    return model.eval().requires_grad_(False).to(device)


@contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Any error of transformers as one of ours, and none of its log lines."""
    from transformers.utils import logging

    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # it raises many kinds, down to plain KeyErrors
        reason = " ".join(str(error).split()) or repr(error)
        raise ModelError(f"{folder}: transformers cannot load it: {reason}") from error
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
