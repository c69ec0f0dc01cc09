"""Draft checkpoints: from a folder or file to the drafter it makes.

Owns what a draft and its target must agree on, and which class drafts. Where a dialect keeps its
fields and tensors `dialects/` knows, what they mean `geometry.py`; here everything has DeepSpec's
spelling. A folder of an ordinary language model is a drafter as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from emberline.config import SlotRule
from emberline.drafters.base import Drafter
from emberline.drafters.block import BlockBackbone
from emberline.drafters.block_config import DraftConfig
from emberline.drafters.dflash import DFlashDrafter
from emberline.drafters.dialects import DraftCheckpoint, read_checkpoint
from emberline.drafters.dialects.canonical import UNUSED, W1, W2
from emberline.drafters.dspark import DSparkDrafter
from emberline.drafters.eagle3_backbone import Eagle3Config
from emberline.drafters.eagle3_checkpoint import load_eagle3
from emberline.drafters.geometry import read_geometry
from emberline.drafters.markov import load_confidence_head, load_markov_head
from emberline.drafters.pairing import check_taps, check_vocabulary
from emberline.drafters.standalone import StandaloneConfig, is_language_model, load_standalone
from emberline.drafters.tables import load_embed, load_head
from emberline.models.target import Target
from emberline.models.weights import ModelError, Weights, read_json
from emberline.ops.kernels import Kernels


def read_draft_config(
    path: Path, slot_rule: SlotRule | None = None, target_depth: int | None = None
) -> DraftConfig | Eagle3Config | StandaloneConfig:
    """What the engine must know before target and drafter exist: taps, K, KV.

    Args:
        path: the draft's folder, or its `.gguf` file.
        slot_rule: which rule its slots follow, whatever the file says; None: what it says.
        target_depth: layers of the target; drafts that name no layers take them from it.

    Raises:
        ModelError: there is no draft of a supported dialect; the message says which dialect or
            field is in the way.
    """
    if _is_language_model(path, slot_rule):
        return StandaloneConfig()
    return read_geometry(read_checkpoint(path, slot_rule, target_depth))


def load_drafter(
    path: Path,
    target: Target,
    *,
    dtype: torch.dtype,
    device: str,
    num_pages: int,
    page_size: int,
    num_draft_tokens: int | None = None,
    confidence_temperatures: Sequence[float] | None = None,
    slot_rule: SlotRule | None = None,
    kernels: Kernels | None = None,
) -> Drafter:
    """The drafter in `path`, drafting for `target`, with KV for `num_pages` pages.

    Embedding and head are the target's unless the checkpoint brings different ones.
    `confidence_temperatures` calibrate its confidences, one for each draft of the checkpoint's
    block however many are drawn; None leaves them as they were trained. `slot_rule` as in
    `read_draft_config`. With `kernels` a block draft is `Capturable`; None runs the CPU's own path.

    Raises:
        ModelError: the checkpoint is not understood whole, or was made for another target, or the
            temperatures for another block.
    """
    path = Path(path)
    if _is_language_model(path, slot_rule):
        if confidence_temperatures is not None:
            raise _no_confidences(str(path))
        return load_standalone(
            path,
            target,
            dtype=dtype,
            device=device,
            num_pages=num_pages,
            page_size=page_size,
            num_draft_tokens=num_draft_tokens,
            kernels=kernels,
        )
    depth = None if target.kv_spec is None else target.kv_spec.num_layers
    checkpoint = read_checkpoint(path, slot_rule, depth)
    return make_drafter(
        checkpoint,
        read_geometry(checkpoint),
        target,
        dtype=dtype,
        device=device,
        num_pages=num_pages,
        page_size=page_size,
        num_draft_tokens=num_draft_tokens,
        confidence_temperatures=confidence_temperatures,
        kernels=kernels,
    )


def make_drafter(
    checkpoint: DraftCheckpoint,
    config: DraftConfig | Eagle3Config,
    target: Target,
    *,
    dtype: torch.dtype,
    device: str,
    num_pages: int,
    page_size: int,
    num_draft_tokens: int | None = None,
    confidence_temperatures: Sequence[float] | None = None,
    kernels: Kernels | None = None,
) -> Drafter:
    """The drafter of a checkpoint under a geometry: its own, or a variation of it.

    Raises:
        ModelError: see `load_drafter`.
    """
    weights = checkpoint.load()
    drafter: Drafter
    if isinstance(config, Eagle3Config):
        if confidence_temperatures is not None:
            raise _no_confidences(checkpoint.source)
        drafter = load_eagle3(
            config,
            weights,
            target,
            dtype=dtype,
            device=device,
            num_pages=num_pages,
            page_size=page_size,
            num_draft_tokens=num_draft_tokens,
        )
    else:
        check_pairing(config, weights, target)
        backbone = BlockBackbone(
            config,
            weights,
            embed=load_embed(
                weights, target, config.hidden_size, dtype, device, config.embed_scale
            ),
            dtype=dtype,
            device=device,
            num_pages=num_pages,
            page_size=page_size,
            row_granule=target.row_granule,
            max_model_len=target.max_model_len,
            kernels=kernels,
        )
        drafter = _block_drafter(
            backbone, weights, target, device, num_draft_tokens, confidence_temperatures
        )
    weights.finish(UNUSED)
    return drafter


def check_pairing(config: DraftConfig, weights: Weights, target: Target) -> None:
    """Refuse a block draft that was made for another target.

    Raises:
        ModelError: with both numbers.
    """
    source, vocab = weights.source, target.vocab_size
    rows = weights.take(W1).shape[0] if weights.has(W1) else config.vocab_size
    for made_for in (rows, config.vocab_size):
        check_vocabulary(source, made_for, target)
    for name in ("lm_head.weight", W2):
        known = weights.take(name).shape[0] if weights.has(name) else vocab
        if known < vocab and not weights.has("d2t"):
            raise ModelError(
                f"{source}: {name!r} has {known} rows of {vocab} tokens, and there is no d2t "
                "to say which"
            )
    if config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{source}: made for a hidden size of {config.hidden_size}, the target has "
            f"{target.hidden_size}"
        )
    check_taps(config.taps, config.num_target_layers, weights, target)


def _block_drafter(
    backbone: BlockBackbone,
    weights: Weights,
    target: Target,
    device: str,
    num_draft_tokens: int | None,
    confidence_temperatures: Sequence[float] | None,
) -> Drafter:
    config, dtype, hidden_size = backbone.config, backbone.dtype, backbone.config.hidden_size
    plain = backbone.kernels is None
    head = load_head(weights, target, hidden_size, dtype, device, config.logit_softcap, widen=plain)
    temperatures = (1.0,) * config.max_draft_tokens
    if confidence_temperatures is not None:
        temperatures = _temperatures(weights.source, config, confidence_temperatures)
    if not config.markov_rank:
        return DFlashDrafter(backbone, head, num_draft_tokens)
    markov = load_markov_head(
        weights, target.vocab_size, hidden_size, dtype, device, whole=not plain
    )
    confidence = None
    if config.has_confidence:
        confidence = load_confidence_head(
            weights, hidden_size, config.markov_rank, temperatures, dtype, device
        )
    return DSparkDrafter(backbone, head, markov, confidence, num_draft_tokens)


def _temperatures(source: str, config: DraftConfig, given: Sequence[float]) -> tuple[float, ...]:
    if not config.has_confidence:
        raise _no_confidences(source)
    if len(given) != config.max_draft_tokens:
        raise ModelError(
            f"{source}: calibrated with {len(given)} temperatures, but its block has "
            f"{config.max_draft_tokens} drafts: calibrate this draft"
        )
    return tuple(given)


def _is_language_model(path: Path, slot_rule: SlotRule | None) -> bool:
    path = Path(path)
    if path.suffix == ".gguf" or not is_language_model(read_json(path / "config.json")):
        return False
    if slot_rule is not None:
        raise ModelError(f"{path}: a slot rule is of block drafts, this is a model: leave it out")
    return True


def _no_confidences(source: str) -> ModelError:
    return ModelError(f"{source}: calibrated, but without confidences: remove the calibration")
