"""What the rows of a folder were sampled with: `synthesis.json`, which both samplers write.

Owns the file, and the refusal to add to rows of other settings, or of none that are known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emberline.train.dataset import SYNTHESIS_FILE

MADE = ("train_*.safetensors", "held_out_*.safetensors", "sampled/round_*.safetensors")
REMEDY = "give the same again, or another folder"


def check_sampling(folder: Path, sampling: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder whose rows are others.

    Args:
        folder: of rows; it may be empty or missing.
        sampling: the settings that all its rows must have been sampled with.

    Raises:
        ValueError: they were sampled with others, or nothing says with which.
    """
    path = folder / SYNTHESIS_FILE
    if not path.exists():
        for pattern in MADE:
            for found in sorted(folder.glob(pattern))[:1]:
                raise ValueError(
                    f"{folder}: holds {found.relative_to(folder)}, and no {SYNTHESIS_FILE} that "
                    "says what it was sampled with: give another folder"
                )
        return
    try:
        there = dict(json.loads(path.read_text(encoding="utf-8"))["sampling"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not what a synthesis writes: give another folder") from None
    for name, value in _as_read(sampling).items():
        if there.get(name) != value:
            raise ValueError(
                f"{path}: sampled with {name} {there.get(name)!r}, not {value!r}: {REMEDY}"
            )


def write_sampling(folder: Path, sampling: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all.

    Args:
        folder: of the rows.
        sampling: what they are sampled with.
        rest: what else the file says; "counts" is None until all rows are there.
    """
    partial = folder / f"{SYNTHESIS_FILE}.partial"
    text = json.dumps({"sampling": _as_read(sampling), **rest}, indent=1)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(folder / SYNTHESIS_FILE)


def _as_read(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they come back from a file: tuples are lists there."""
    read: dict[str, Any] = json.loads(json.dumps(sampling))
    return read


def seed_of(seed: int, name: str) -> int:
    """63 bits for what is drawn under a name: no other name moves them."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
