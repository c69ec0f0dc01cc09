"""Trained drafts for tests: as a trainable model, or written in the compact form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from emberline.train.config import DraftConfig
from emberline.train.export import compact, write_folder
from emberline.train.model import Model, build_model


def load_model(config: DraftConfig, tensors: Mapping[str, Tensor]) -> Model:
    """A draft with the given checkpoint tensors (tap scale one: it is folded)."""
    model = build_model(config)
    model.load_state_dict({**tensors, "tap_scale": torch.ones(config.tap_width)})
    return model.requires_grad_(False)


def write_compact(folder: Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> None:
    write_folder(folder, config.to_json(), compact(tensors))
