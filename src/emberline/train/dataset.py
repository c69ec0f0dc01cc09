"""Token rows on disk: what synthesis writes and training reads.

A folder holds `train_*.safetensors` and `held_out_*.safetensors`, each with `tokens` [N, L] int32
and `roles` [N, L] uint8. All rows of a folder have one length; shorter text is padded on the
right, and padding is `Role.FORCED`, as is all that nobody has to predict.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

SYNTHESIS_FILE = "synthesis.json"
"""Settings and counts of rows that came from the engine; the counts are null until all is done."""
ROUNDS_LOG = "rounds.jsonl"
"""A line for each round of rows that the lockstep sampler made: split, rows, seconds."""


class Role(IntEnum):
    """Who wrote a token. Only the model's own tokens are worth predicting."""

    FORCED = 0  # template pieces, given openings and prompts, padding
    USER = 1
    ANSWER = 2
    PLAIN = 3


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Sequences of one length."""

    tokens: Tensor  # [N, L] int32
    roles: Tensor  # [N, L] uint8

    @property
    def lens(self) -> Tensor:
        """[N] int64: tokens up to the last that somebody has to predict; padding lies behind."""
        places = torch.arange(1, self.roles.shape[1] + 1, device=self.roles.device)
        return ((self.roles > 0) * places).amax(dim=1)

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
        FileNotFoundError: the folder holds no such rows, or not all of them yet.
        ValueError: its files are no token rows, or not of one length.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of token rows (--data)")
    settings = folder / SYNTHESIS_FILE
    if settings.exists():
        made = json.loads(settings.read_text(encoding="utf-8"))
        if made.get("refused"):
            raise ValueError(f"{folder}: the synthesis is refused: {made['refused']}")
        if not made["counts"]:
            raise FileNotFoundError(f"{folder}: the synthesis is not done; run the same one again")
    paths = sorted(folder.glob(f"{split}_*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no {split}_*.safetensors; run the synthesis first")
    parts = [_read_rows(path) for path in paths]
    length = parts[0].tokens.shape[1]
    for path, part in zip(paths, parts, strict=True):
        if part.tokens.shape[1] != length:
            raise ValueError(
                f"{path}: rows of {part.tokens.shape[1]} tokens, those of {paths[0].name} have "
                f"{length}: make all with one --seq-len"
            )
    return TokenRows(
        torch.cat([part.tokens for part in parts]), torch.cat([part.roles for part in parts])
    )


def _read_rows(path: Path) -> TokenRows:
    """One file's rows.

    Raises:
        ValueError: they are none.
    """
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"{path}: cannot be read ({problem}): make the rows again") from None
    tokens, roles = found.get("tokens"), found.get("roles")
    if tokens is None or roles is None or tokens.dim() != 2 or tokens.shape != roles.shape:
        raise ValueError(f"{path}: expected tokens and roles of one shape [rows, length]")
    return TokenRows(tokens, roles)


def log_round(folder: Path, split: str, num_rows: int, seconds: float) -> None:
    """Add a line to the folder's `ROUNDS_LOG`."""
    line = {"split": split, "rows": num_rows, "seconds": round(seconds, 2)}
    with (folder / ROUNDS_LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Its lines; [] without such a file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
