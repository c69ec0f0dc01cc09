"""Cost tables on disk: the native file and those of other engines, told apart by what is in them.

Owns reading and writing. Must not know the fields of any of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from emberline.models.weights import ModelError, read_json
from emberline.verify import cost_profile, foreign_costs
from emberline.verify.cost_profile import CostProfile
from emberline.verify.foreign_costs import ForeignFormat
from emberline.verify.step_cost import StepCosts

CostFormat = Literal["native"] | ForeignFormat
REMEDY = "correct it, or measure again with `emberline profile`"


def load_costs(path: Path) -> StepCosts:
    """The costs in a file of any format.

    Files of other engines have no draft costs: drafting counts as free, and the whole time of their
    steps is in the target's part, whether a step drafts or not.

    Raises:
        ModelError: the file cannot be read, or a field of it has no meaning.
    """
    data = read_json(path)
    if data.get("format") == cost_profile.FORMAT:
        return load_profile(path).costs
    kind = foreign_costs.format_of(data)
    if kind is None:
        raise ModelError(
            f"{path}: no cost table: expected one of `emberline profile`, or SGLang's "
            "(sample_batch_tokens or bias_seconds) or TensorRT-LLM's (token_counts or cost_tables)"
        )
    try:
        return foreign_costs.read(kind, data)
    except (ValueError, OverflowError) as error:
        raise ModelError(f"{path}: {error}; {REMEDY}") from error


def load_profile(path: Path) -> CostProfile:
    """A native file, with what it was measured on.

    Raises:
        ModelError: the file cannot be read, is of another format, or a field has no meaning.
    """
    data = read_json(path)
    if data.get("format") != cost_profile.FORMAT:
        raise ModelError(
            f"{path}: format must be {cost_profile.FORMAT!r}, got {data.get('format')!r}; {REMEDY}"
        )
    try:
        return cost_profile.from_json(data)
    except (ValueError, OverflowError) as error:
        raise ModelError(f"{path}: {error}; {REMEDY}") from error


def save_profile(path: Path, profile: CostProfile, kind: CostFormat = "native") -> None:
    """Write a profile, whole or not at all. `foreign_costs.write` says what a format loses.

    Raises:
        OSError: the file cannot be written.
    """
    foreign = None if kind == "native" else foreign_costs.write(kind, profile)
    text = json.dumps(foreign or cost_profile.to_json(profile), indent=1) + "\n"
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():  # a device or a pipe is written to, never replaced
        path.write_text(text, encoding="utf-8")
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
