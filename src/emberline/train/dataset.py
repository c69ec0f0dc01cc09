"""Token rows on disk: what synthesis writes and training reads.

A folder holds `train_*.safetensors` and `held_out_*.safetensors`, each with `tokens` [N, L] int32
and `roles` [N, L] uint8. All rows of a folder have one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class Role(IntEnum):
    """Who wrote a token. Only the model's own tokens are worth predicting."""

    FORCED = 0  # template pieces and given openings
    USER = 1
    ANSWER = 2
    PLAIN = 3


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Sequences of one length."""

    tokens: Tensor  # [N, L] int32
    roles: Tensor  # [N, L] uint8

    @property
    def num_rows(self) -> int:
        """N."""
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> TokenRows:
        """The same rows on another device."""
        return TokenRows(self.tokens.to(device), self.roles.to(device))

    def save(self, path: Path) -> None:
        """Write one file, whole or not at all."""
        partial = path.with_suffix(".partial")
        tensors = {"tokens": self.tokens.cpu().contiguous(), "roles": self.roles.cpu().contiguous()}
        save_file(tensors, partial)
        partial.replace(path)


def load_rows(folder: Path, split: str) -> TokenRows:
    """All rows of `split` ("train" or "held_out").

    Raises:
        FileNotFoundError: the folder holds no such rows.
    """
    paths = sorted(Path(folder).glob(f"{split}_*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no {split}_*.safetensors; run the synthesis first")
    parts = [load_file(path) for path in paths]
    return TokenRows(
        torch.cat([part["tokens"] for part in parts]), torch.cat([part["roles"] for part in parts])
    )
