"""What training needs of a target, and which of the two forms of it a folder gets.

`target.FrozenTarget` is our own forward pass for the Llama-shaped families and fast; any other
model runs as transformers has it, in `stock_target.StockFrozenTarget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from emberline.models.weights import read_json
from emberline.train.stock_target import StockFrozenTarget
from emberline.train.target import FrozenTarget, is_fast, soft_capped, wide_linear


class TrainingTarget(Protocol):
    """A target whose weights stay as they are.

    Its logits are `target_logits` of a last hidden state. A draft shares embedding, head and cap.
    """

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and states."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[V, D] input embeddings; a scale that the family puts on them is in it."""
        ...

    @property
    def head(self) -> Tensor:
        """[V, D] output head; a scale that the family puts on logits is in it."""
        ...

    @property
    def logit_cap(self) -> float | None:
        """c of logits that are c * tanh(x / c); None: they are as the head says."""
        ...

    @property
    def captures(self) -> bool:
        """Whether `features` may be captured as a CUDA graph."""
        ...

    def features(self, tokens: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run whole sequences causally.

        Args:
            tokens: [S, L] int64, no padding on the left (padding on the right is harmless).
            taps: layers whose raw outputs are wanted; -1 is the input of the first.

        Returns:
            The taps concatenated [S, L, A], and the last hidden state after the final norm
            [S, L, D].
        """
        ...


def load_frozen(folder: Path, device: torch.device, compiled: bool = False) -> TrainingTarget:
    """The target in `folder`, in the faster form that can run it.

    Args:
        folder: a Hugging Face model folder.
        device: bfloat16 on CUDA, float32 on a CPU.
        compiled: fuse the fast form's pieces with torch.compile (fixed batch shapes only).

    Raises:
        ModelError: serving could not run this model either.
        ValueError: its head is not one that a draft can be trained for.
    """
    if is_fast(read_json(folder / "config.json")):
        return FrozenTarget(folder, device, compiled=compiled)
    return StockFrozenTarget(folder, device)


def target_logits(target: TrainingTarget, hidden: Tensor) -> Tensor:
    """Logits [N, V] float32 of last hidden states [N, D]."""
    return soft_capped(wide_linear(hidden, target.head), target.logit_cap)
