"""Rotary frequencies as transformers defines them, and the tables of one step.

Owns the choice of a frequency set that is the same for every length a sequence may reach: keys in
the pages are rotated once, so a set that changes as a sequence grows cannot be honoured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from emberline.models.weights import ModelError
from emberline.ops.rotary import sign_sin

_FIXED = ("linear", "yarn", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Angles by position: cos and sin are multiplied by `scaling` (YaRN, LongRoPE)."""

    inv_freq: Tensor  # [head_dim / 2] float32, radians a position
    scaling: float
    max_len: int | None  # beyond it transformers would switch to another set; None: never

    def to(self, device: str) -> RopeTable:
        """The same table on `device`."""
        return RopeTable(self.inv_freq.to(device), self.scaling, self.max_len)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Factors of [N] positions for `ops.rotary.rotate`: cosines and signed sines.

        Two [N, head_dim], computed in float32 and then rounded.
        """
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (
            (angles.cos() * self.scaling).to(dtype),
            sign_sin((angles.sin() * self.scaling).to(dtype)),
        )

    def tabulate(self, count: int, dtype: torch.dtype) -> Tensor:
        """`cos_sin` of positions 0 .. count - 1, made once: a step then only looks up.

        Returns:
            [count, 2, head_dim] cosines and signed sines.
        """
        positions = torch.arange(count, device=self.inv_freq.device)
        return torch.stack(self.cos_sin(positions, dtype), dim=1)


def rope_from_config(hf: Any) -> RopeTable:
    """Frequencies of a transformers config, by its own functions.

    "dynamic" and "longrope" change their frequencies once a sequence outgrows the original
    context: they are exact up to there, which is what `max_len` says.

    Raises:
        ModelError: a variant that this decoder cannot honour.
    """
    rope = hf.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    # "proportional" turns a part of a head's pairs too, the others by no angle: a full table.
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and kind != "proportional":
        raise ModelError("rope: partial_rotary_factor is not implemented")
    if head_dim % 2:
        raise ModelError(f"rope: head_dim must be even, got {head_dim}")
    max_len: int | None = None
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return RopeTable(1.0 / (rope["rope_theta"] ** exponents), 1.0, None)
    if kind == "dynamic":
        max_len = hf.max_position_embeddings
    elif kind == "longrope":
        max_len = rope["original_max_position_embeddings"]
    elif kind not in _FIXED:
        raise ModelError(f"rope: type {kind!r} is not implemented")
    try:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"rope: {kind} parameters are not complete: {error!r}") from error
    return RopeTable(inv_freq.float(), float(scaling), max_len)
