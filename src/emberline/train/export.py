"""Drafts on disk: the full bfloat16 DeepSpec folder, and the compact int8 form.

The full folder carries embedding and output head as frozen copies of the target's, as other
engines of this dialect expect. The compact form leaves them out and stores every matrix NAME as
int8 rows with `NAME_scale`, one float32 a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from emberline.models.weights import load_folder
from emberline.train.backbone import DraftModel
from emberline.train.config import DraftConfig

SCALE = "_scale"
WEIGHTS = "model.safetensors"
SHARED = ("embed_tokens.weight", "lm_head.weight")


def checkpoint_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A trained state dict under checkpoint names, float32: the tap scale folded into `fc`."""
    tensors = {name: tensor.detach().float().cpu() for name, tensor in state.items()}
    scale = tensors.pop("tap_scale")
    tensors["fc.weight"] = tensors["fc.weight"] * scale
    return tensors


def quantise_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 by row. [m, n] float -> int8 [m, n], scale [m] float32.

    Each value is off by at most half its row's scale.
    """
    scale = matrix.float().abs().amax(dim=1).clamp(min=1e-12) / 127
    return (matrix.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint tensors in the compact form: matrices int8 with scales, the rest float32."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in SHARED:
            continue
        if tensor.dim() == 2:
            result[name], result[name + SCALE] = quantise_rows(tensor)
        else:
            result[name] = tensor.float()
    return result


def expand(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `compact`: float32 checkpoint tensors. Tensors without a scale pass through."""
    result = {}
    for name, tensor in tensors.items():
        if name + SCALE in tensors:
            result[name] = tensor.float() * tensors[name + SCALE][:, None]
        elif not name.endswith(SCALE):
            result[name] = tensor.float()
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
    tensors = expand(load_file(source / WEIGHTS))
    return DraftConfig.from_json(raw), {n: t for n, t in tensors.items() if n not in SHARED}


def load_model(config: DraftConfig, tensors: Mapping[str, Tensor]) -> DraftModel:
    """A `DraftModel` with the given checkpoint tensors (tap scale one: it is folded)."""
    model = DraftModel(config)
    model.load_state_dict({**tensors, "tap_scale": torch.ones(config.tap_width)})
    return model.requires_grad_(False)


def write_compact(folder: Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write the compact int8 folder."""
    _write(folder, config.to_json(), compact(tensors))


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
    _write(folder, config.to_json(), whole)


def target_tables(folder: Path, config: DraftConfig) -> tuple[Tensor, Tensor]:
    """Embedding and output head of the target in `folder`, each [V, D].

    Raises:
        ValueError: the draft was made for a target of another size.
    """
    weights = load_folder(folder)
    embedding = weights.take("model.embed_tokens.weight")
    head = weights.take("lm_head.weight") if weights.has("lm_head.weight") else embedding
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"{folder}: embedding of shape {list(embedding.shape)}, the draft needs "
            f"{[config.vocab_size, config.hidden_size]}: it belongs to another target"
        )
    return embedding, head


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    # Tied target weights share memory, which the format does not allow.
    owned = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    partial = folder / f"{WEIGHTS}.partial"
    save_file(owned, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)
