"""Drafts on disk: the full bfloat16 DeepSpec folder, and the compact int8 form.

The full folder carries embedding and output head as frozen copies of the target's, as other
engines of this dialect expect. The compact form leaves them out and stores every matrix NAME as
int8 with a scale for every 64 columns of a row (`models/int8.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emberline.drafters.block_config import DraftConfig as BlockGeometry
from emberline.drafters.dialects import DraftCheckpoint, flat
from emberline.drafters.dialects.canonical import SHARED
from emberline.drafters.eagle3_backbone import Eagle3Config
from emberline.models.int8 import SCALE, expand, quantise
from emberline.models.weights import load_folder, read_json
from emberline.train.config import DraftConfig
from emberline.train.stock_target import StockFrozenTarget
from emberline.train.target import is_fast

WEIGHTS = "model.safetensors"


def checkpoint_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A trained state dict under checkpoint names, float32: the tap scale folded into `fc`."""
    tensors = {name: tensor.detach().float().cpu() for name, tensor in state.items()}
    scale = tensors.pop("tap_scale")
    tensors["fc.weight"] = tensors["fc.weight"] * scale
    return tensors


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint tensors in the compact form: matrices int8 with scales, the rest float32."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in SHARED:
            continue
        if tensor.dim() == 2 and tensor.is_floating_point():
            result[name], result[name + SCALE] = quantise(tensor)
        else:
            result[name] = tensor.float() if tensor.is_floating_point() else tensor
    return result


def read_draft(source: Path) -> tuple[DraftConfig, dict[str, Tensor]]:
    """Config and float32 checkpoint tensors of a training checkpoint (a file) or a draft folder.

    Raises:
        FileNotFoundError: neither is there.
    """
    if source.is_file():
        saved = torch.load(source, map_location="cpu", weights_only=True)
        return DraftConfig.from_json(saved["draft"]), checkpoint_tensors(saved["model"])
    if not (source / WEIGHTS).is_file():
        raise FileNotFoundError(f"{source}: expected a checkpoint file or a folder with {WEIGHTS}")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = expand(load_file(source / WEIGHTS), str(source))
    own = {name: tensor.float() for name, tensor in tensors.items() if name not in SHARED}
    return DraftConfig.from_json(raw), own


def checkpoint_of(source: Path) -> DraftCheckpoint:
    """The draft in a training checkpoint, as if it had been exported."""
    config, tensors = read_draft(source)
    raw = config.to_json()
    return flat.read(raw, raw["architectures"][0], tensors, str(source), None)


def write_full(
    folder: Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    head: Tensor,
) -> None:
    """Write the full bfloat16 folder. embedding, head: [V, D] of the target."""
    shared = dict(zip(SHARED, (embedding, head), strict=True))
    whole = {name: t.to(torch.bfloat16) for name, t in {**tensors, **shared}.items()}
    write_folder(folder, config.to_json(), whole)


def target_tables(
    folder: Path, config: DraftConfig | BlockGeometry | Eagle3Config
) -> tuple[Tensor, Tensor]:
    """Embedding and output head of the target in `folder`, each [V, D], with their scales.

    Raises:
        ModelError: the target's files cannot be read.
        ValueError: the draft was made for a target of another size.
    """
    if is_fast(read_json(folder / "config.json")):
        weights = load_folder(folder)
        embedding = weights.take("model.embed_tokens.weight")
        head = weights.take("lm_head.weight") if weights.has("lm_head.weight") else embedding
    else:
        target = StockFrozenTarget(folder, torch.device("cpu"))
        embedding, head = target.embedding, target.head
    rows = config.vocab_size or embedding.shape[0]
    if tuple(embedding.shape) != (rows, config.hidden_size):
        raise ValueError(
            f"{folder}: embedding of shape {list(embedding.shape)}, the draft needs "
            f"{[rows, config.hidden_size]}: it belongs to another target"
        )
    return embedding, head


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config and weights; a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    # Tied target weights share memory, which the format does not allow.
    owned = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    partial = folder / f"{WEIGHTS}.partial"
    save_file(owned, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)
