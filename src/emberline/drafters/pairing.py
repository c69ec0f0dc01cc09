"""What a draft of any kind and its target must agree on: the vocabulary and the tapped layers.

Owns those fields' checks, on their own and against a target. Must not know any algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emberline.models.target import Target
from emberline.models.weights import ModelError, Weights

Taps = tuple[int, ...]


def read_taps(raw: Mapping[str, Any]) -> tuple[Taps, int | None]:
    """Tapped layers (0-based outputs, -1 = embeddings) and the depth of the target, where stated.

    Raises:
        KeyError: `target_layer_ids` is missing.
        ValueError: they do not rise, or go beyond that depth.
    """
    taps = tuple(int(layer) for layer in raw["target_layer_ids"])
    depth = raw.get("num_target_layers")
    if not taps or min(taps) < -1 or list(taps) != sorted(set(taps)):
        raise ValueError(f"target_layer_ids must rise strictly from -1 on, got {list(taps)}")
    if depth is not None and max(taps) >= depth:
        raise ValueError(f"target_layer_ids {list(taps)} go beyond {depth} layers")
    return taps, depth


def check_vocabulary(source: str, made_for: int | None, target: Target) -> None:
    """Refuse a draft for another number of tokens; None fits any target.

    Raises:
        ModelError: with both numbers.
    """
    if made_for not in (None, target.vocab_size):
        raise ModelError(
            f"{source}: made for a vocabulary of {made_for}, the target has {target.vocab_size}"
        )


def check_taps(taps: Taps, made_for: int | None, weights: Weights, target: Target) -> None:
    """Refuse a draft whose tapped layers are not this target's.

    Args:
        taps: the draft's.
        made_for: depth of the target it was made for, where stated.
        weights: `fc.weight` reads all taps side by side.
        target: its layers may be wider than its embedding.

    Raises:
        ModelError: with both numbers.
    """
    source, width = weights.source, target.hidden_size
    columns = weights.take("fc.weight").shape[-1]
    if columns != len(taps) * width:
        raise ModelError(
            f"{source}: {len(taps)} tapped layers of width {width} do not fill fc.weight's "
            f"{columns} columns"
        )
    if target.kv_spec is None:
        return
    depth = target.kv_spec.num_layers
    if max(taps) >= depth:
        raise ModelError(f"{source}: taps layer {max(taps)}, the target has {depth} layers")
    if made_for not in (None, depth):
        raise ModelError(f"{source}: made for a target of {made_for} layers, not of {depth}")
