"""Which dialect a draft checkpoint is in.

Owns the order in which dialects are recognised, and the list of those that are not supported. A
wrong guess about a tap or a slot does not crash, it only ruins acceptance: what is not understood
is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from emberline.config import SlotRule
from emberline.drafters.dialects import flat, gguf, speculators
from emberline.drafters.dialects.canonical import DraftCheckpoint, strip_prefixes
from emberline.models.weights import ModelError, load_folder, read_json

REFUSED_CLASSES = {
    "DominoDraftModel": "Domino: its GRU head over the drafts",
    "Qwen3DFlash2DraftModel": "DFlash 2: its convolutions and candidate selector",
    "DFlash2DraftModel": "DFlash 2: its convolutions and candidate selector",
    "PEagleDraftModel": "P-EAGLE: its parallel drafting with mask_hidden",
    "DSparkMiniMaxDraftModel": "MiniMax: its mxfp8 weights and 1 + w norms",
    "MiniMaxM3DSparkModel": "MiniMax: its backbone",
    "Lfm2DSparkDraftModel": "LFM2: its convolution backbone",
    "DeepseekV4DSparkModel": "DeepSeek-V4: its latent attention with sinks",
    "Glm5_2DSparkModel": "GLM-5.2: its backbone",
    "KimiK3DSparkModel": "Kimi K3: its latent attention",
    "Gemma4Eagle3Model": "EAGLE-3 on Gemma 4: its backbone",
}
"""Classes that are known and not supported: what is missing for them."""

REFUSED_TENSORS = {
    "mtp.": "DeepSeek-V4: the draft inside its target (latent attention, experts)",
    "candidate_selector.": "DFlash 2: its convolutions and candidate selector",
    "prefix_gru.": "Domino: its GRU head over the drafts",
    "aux_hidden_norms.": "Laguna: its norms of the taps and attention gates",
    "mask_hidden": "P-EAGLE: its parallel drafting with mask_hidden",
}
"""Tensors, by how their names begin, that tell such a draft whatever its config says."""


def read_checkpoint(
    path: Path, slot_rule: SlotRule | None = None, target_depth: int | None = None
) -> DraftCheckpoint:
    """Recognise a draft and bring it to DeepSpec's spelling.

    Args:
        path: a folder with `config.json` and safetensors, or a `.gguf` file.
        slot_rule: which rule its slots follow, whatever the file says; None: what it says.
        target_depth: layers of the target; drafts that name no layers take them from it.

    Raises:
        ModelError: no draft of a supported dialect; the message says what is in the way.
    """
    path = Path(path)
    where = path if path.suffix == ".gguf" else path / "config.json"
    try:
        found = _read_gguf(path) if path.suffix == ".gguf" else _read_folder(path, target_depth)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{where}: {reason}") from error
    if slot_rule is None:
        return found
    if found.slot_rule is None:
        raise ModelError(f"{path}: a slot rule is of block drafts, and this is an EAGLE-3 draft")
    return replace(found, slot_rule=slot_rule, slot_reason="as given", ambiguous=False)


def _read_gguf(path: Path) -> DraftCheckpoint:
    found = gguf.read(path)
    _refuse_tensors(found.shapes)
    return found


def _read_folder(folder: Path, target_depth: int | None) -> DraftCheckpoint:
    raw = read_json(folder / "config.json")
    if "dspark_block_size" in raw:
        raise ValueError(f"not supported is {REFUSED_TENSORS['mtp.']}")
    name = _class_name(raw)
    known = "speculators_model_type" in raw or name in flat.CLASSES
    if not known and name not in REFUSED_CLASSES:
        raise ValueError(f"{name} is not a draft this version knows: {', '.join(flat.CLASSES)}")
    if name in REFUSED_CLASSES:
        raise ValueError(f"{name}: not supported is {REFUSED_CLASSES[name]}")
    tensors = strip_prefixes(load_folder(folder))
    _refuse_tensors(tensors)
    if "speculators_model_type" in raw:
        return speculators.read(raw, tensors, str(folder), target_depth)
    return flat.read(raw, name, tensors, str(folder), target_depth)


def _class_name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [None]
    return str(names[0])


def _refuse_tensors(names: Iterable[str]) -> None:
    for name in names:
        for start, what in REFUSED_TENSORS.items():
            if name.startswith(start):
                raise ValueError(f"tensor {name!r}: not supported is {what}")
