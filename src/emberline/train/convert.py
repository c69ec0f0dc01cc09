"""A draft, trained here or anywhere, written in the form that another engine reads.

Owns which forms there are and what each needs of the target. How a form is spelt its dialect knows;
the int8 form is this engine's own (`train/export.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from emberline.drafters.block_config import DraftConfig as BlockGeometry
from emberline.drafters.dialects import DraftCheckpoint, flat, read_checkpoint, speculators
from emberline.drafters.dialects.canonical import SHARED
from emberline.drafters.dialects.gguf_write import write_gguf
from emberline.drafters.eagle3_backbone import Eagle3Config
from emberline.drafters.geometry import read_geometry
from emberline.drafters.tables import draft_ids
from emberline.models.gguf_file import read_gguf
from emberline.models.weights import Weights, read_json
from emberline.train.export import WEIGHTS, checkpoint_of, compact, target_tables, write_folder

Form = Literal["deepspec", "speculators", "gguf", "zlab", "int8"]
FORMS: tuple[Form, ...] = get_args(Form)
Dtype = Literal["bfloat16", "float32"]
Geometry = BlockGeometry | Eagle3Config


def open_draft(source: Path, target_depth: int | None = None) -> DraftCheckpoint:
    """A draft to convert: a training checkpoint (a file), or a draft of any dialect.

    Raises:
        FileNotFoundError: there is nothing.
        ModelError: it is no draft that this version understands.
    """
    if source.is_file() and source.suffix != ".gguf":
        return checkpoint_of(source)
    if not source.exists():
        raise FileNotFoundError(f"{source}: expected a checkpoint file, a draft folder or a .gguf")
    return read_checkpoint(source, target_depth=target_depth)


def convert(
    out: Path,
    checkpoint: DraftCheckpoint,
    form: Form,
    dtype: Dtype,
    target: Path | None,
    target_file: Path | None = None,
) -> Path:
    """Write a draft.

    Args:
        out: the folder to write, or the file where the form is one.
        checkpoint: the draft.
        form: one of `FORMS`.
        dtype: of the matrices; int8 has its own.
        target: folder of the target, for its embedding and head where the form carries them and
            the draft has none of its own; None if nobody needs it.
        target_file: the target's GGUF file, whose tokenizer a GGUF draft takes along.

    Returns:
        The file of the weights.

    Raises:
        ValueError: the form cannot say this draft, or the draft is of another target.
    """
    checkpoint = _with_vocabulary(checkpoint, target)
    config = read_geometry(checkpoint)  # what cannot be loaded is not written either
    wide = _cast(checkpoint, torch.float32 if dtype == "float32" else torch.bfloat16)
    if form in ("deepspec", "speculators"):
        tables = _tables(checkpoint, config, target, dtype)
        if form == "deepspec":
            return _folder(out, dtype, *flat.write(wide, tables))
        return _folder(out, dtype, *speculators.write(wide, tables, _verifier(target)))
    own = _own_tables(checkpoint, config, target)
    if form == "gguf":
        tokenizer = {} if target_file is None else read_gguf(target_file).metadata
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f"{out.name}.partial")
        write_gguf(partial, wide, tokenizer, own)
        return partial.replace(out)
    if own:
        raise ValueError(
            f"{', '.join(own)} of this draft are not its target's, and {form} leaves them to the "
            "target: export it as deepspec"
        )
    if form == "zlab":
        return _folder(out, dtype, *flat.write_zlab(wide))
    raw, tensors = flat.write_own(checkpoint)
    return _folder(out, "bfloat16", raw, compact(tensors))


def _with_vocabulary(checkpoint: DraftCheckpoint, target: Path | None) -> DraftCheckpoint:
    """The same draft with the vocabulary's size, which a file may leave to the target."""
    if checkpoint.config.get("vocab_size") is not None:
        return checkpoint
    raw = {} if target is None else read_json(target / "config.json")
    nested = raw.get("text_config")
    size = (nested if isinstance(nested, dict) else raw).get("vocab_size")
    if size is None:
        raise ValueError("the draft does not say how many tokens there are: name its --model")
    return replace(checkpoint, config={**checkpoint.config, "vocab_size": size})


def _folder(out: Path, dtype: str, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    write_folder(out, {**config, "dtype": dtype}, tensors)
    return out / WEIGHTS


def _tables(
    checkpoint: DraftCheckpoint, config: Geometry, target: Path | None, dtype: Dtype
) -> dict[str, Tensor]:
    """Embedding and head of the target, where the draft lacks one of its own."""
    if all(name in checkpoint.shapes for name in SHARED):
        return {}
    if target is None:
        raise ValueError("the target's embedding and head go along: name it with --model")
    embedding, head = target_tables(target, config)
    if (scale := _embed_scale(config)) != 1.0:  # which whoever reads the draft applies
        embedding = embedding.float() / scale
    cast = (table.to(getattr(torch, dtype)) for table in (embedding, head))
    tables = dict(zip(SHARED, cast, strict=True))
    if "d2t" in checkpoint.shapes:  # the head's rows of the tokens that the draft knows
        ids = draft_ids(checkpoint.load(), tables[SHARED[1]].shape[0])
        tables[SHARED[1]] = tables[SHARED[1]][ids]
    return tables


def _own_tables(
    checkpoint: DraftCheckpoint, config: Geometry, target: Path | None
) -> tuple[str, ...]:
    """Those of the draft's tables that are no copies of the target's."""
    present = [name for name in SHARED if name in checkpoint.shapes]
    if not present or "d2t" in checkpoint.shapes or target is None:
        return tuple(present)
    scale = _embed_scale(config)
    theirs = dict(zip(SHARED, target_tables(target, config), strict=True))
    weights, own = checkpoint.load(), []
    for name in present:
        mine = weights.take(name)
        scaled = (mine.float() * (scale if name == SHARED[0] else 1.0)).to(mine.dtype)
        if not torch.equal(scaled, theirs[name].to(mine.dtype)):
            own.append(name)
    return tuple(own)


def _embed_scale(config: Geometry) -> float:
    return config.embed_scale if isinstance(config, BlockGeometry) else 1.0


def _cast(checkpoint: DraftCheckpoint, dtype: torch.dtype) -> DraftCheckpoint:
    """The same draft, its floats in `dtype`."""

    def load() -> Weights:
        weights = checkpoint.load()
        tensors = {name: weights.take(name) for name in weights.names()}
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        return Weights(cast, checkpoint.source)

    return replace(checkpoint, load=load)


def _verifier(target: Path | None) -> Mapping[str, Any]:
    if target is None:
        return {"name_or_path": None, "architectures": []}
    architectures = read_json(target / "config.json").get("architectures") or []
    return {"name_or_path": target.name, "architectures": architectures}
