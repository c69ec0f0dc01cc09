"""Checkpoints whose config is one flat object: DeepSpec, SpecForge, z-lab and NeMo.

Owns where these four keep a field, and which slot rule each class follows. All of them count
target layers from 0 and mean a layer's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from emberline.config import SlotRule
from emberline.drafters.dialects.canonical import (
    SHARED,
    W1,
    DraftCheckpoint,
    from_tensors,
    head_fields,
    shapes_of,
)

QWEN3, GEMMA4 = "Qwen3DSparkModel", "Gemma4DSparkModel"
DSPARK_CLASSES = {
    QWEN3: "DeepSpec",
    GEMMA4: "DeepSpec",
    "DSparkDraftModel": "SpecForge",
}
DFLASH_CLASSES = {"DFlashDraftModel": "z-lab", "Qwen3DFlashDraftModel": "NeMo"}
EAGLE3_CLASSES = {
    "Qwen3Eagle3Model": "DeepSpec",
    "LlamaForCausalLMEagle3": "SpecForge",
    "LlamaEagle3DraftModel": "NeMo",
}
CLASSES = {**DSPARK_CLASSES, **DFLASH_CLASSES, **EAGLE3_CLASSES}
"""Class name to the project that writes it."""

MASK_FIELDS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Where the mask token may stand at the top level, after `dflash_config.mask_token_id`."""

NUM_ANCHORS = 512  # of DeepSpec's training; its class asks for the field

EAGLE3_STEPS = 7
"""Drafts of an EAGLE-3 block where the file does not say: what such drafts are trained to take."""

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"

EAGLE3_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Fields of an EAGLE-3 config that are off by default."""


def read(
    raw: Mapping[str, Any],
    name: str,
    tensors: dict[str, Tensor],
    source: str,
    target_depth: int | None,
) -> DraftCheckpoint:
    """A folder's config and tensors (prefixes stripped), its class `name` one of `CLASSES`.

    Raises:
        KeyError, ValueError: a field is missing or not supported.
    """
    if name in EAGLE3_CLASSES:
        return eagle3(raw, tensors, source, EAGLE3_CLASSES[name], target_depth)
    nested = raw.get("dflash_config") or {}
    kind = nested.get("projector_type", "dspark")
    if kind not in ("dspark", "dflash"):
        raise ValueError(f"projector_type {kind!r} is not supported, only dspark and dflash")
    shapes = shapes_of(tensors)
    config = {**raw, **nested, "mask_token_id": _mask_token(raw, nested)}
    if raw.get("causal"):  # at either place
        config["causal"] = True
    # A head that is only promised stays promised, so that its tensors are missed.
    config |= head_fields(shapes, int(raw["hidden_size"]))
    config["architectures"] = [name if name == GEMMA4 else QWEN3]
    rule, reason, ambiguous = _slot_rule(name, nested, W1 in tensors)
    return DraftCheckpoint(
        source=source,
        dialect=f"{CLASSES[name]} ({name})",
        config=config,
        shapes=shapes,
        load=lambda: from_tensors(tensors, source),
        slot_rule=rule,
        slot_reason=reason,
        ambiguous=ambiguous,
    )


def write(
    checkpoint: DraftCheckpoint, tables: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors in DeepSpec's own form, with its copies of embedding and head.

    Args:
        checkpoint: the draft.
        tables: `SHARED` of the target, used where the draft has none of its own.

    Raises:
        ValueError: DeepSpec's classes cannot say this draft.
    """
    if checkpoint.slot_rule == "shifted":
        raise ValueError(
            "the anchor's slot of this draft predicts nothing, which DeepSpec's classes cannot "
            "say: export it as zlab or speculators"
        )
    if "d2t" in checkpoint.shapes:
        raise ValueError("DeepSpec has no reduced vocabulary: export this draft as speculators")
    if checkpoint.slot_rule is None:
        _check_deepspec_eagle3(checkpoint)
    config, tensors = write_own(checkpoint)
    return config, {**tables, **tensors}


def _check_deepspec_eagle3(checkpoint: DraftCheckpoint) -> None:
    """Its one class has norms of queries and keys, and none of the other families' options."""
    if not any(name.endswith("q_norm.weight") for name in checkpoint.shapes):
        raise ValueError(
            "DeepSpec's EAGLE-3 has norms of queries and keys, and this draft none: export it as "
            "speculators"
        )
    for name in EAGLE3_OPTIONS:
        if checkpoint.config.get(name):
            raise ValueError(f"DeepSpec's EAGLE-3 has no {name}: export this draft as int8")


def write_own(checkpoint: DraftCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors as this engine reads them back, no table of the target among them.

    DeepSpec's form, or z-lab's where the anchor's slot predicts nothing.

    Raises:
        ValueError: that slot predicts nothing, in a draft with a Markov head or Gemma 4's backbone.
    """
    config, weights = dict(checkpoint.config), checkpoint.load()
    tensors = {name: weights.take(name) for name in weights.names()}
    if checkpoint.slot_rule is None:
        return config, tensors
    names = ("target_layer_ids", "mask_token_id")
    nested = {name: config[name] for name in names}
    if checkpoint.slot_rule == "anchor":
        config.setdefault("num_anchors", NUM_ANCHORS)
        return {**config, "dflash_config": nested}, tensors  # some engines look there
    if W1 in tensors or config["architectures"][0] == GEMMA4:
        what = "Markov head" if W1 in tensors else "Gemma 4 backbone"
        raise ValueError(f"z-lab's class has no {what}, and no other's anchor predicts nothing")
    for name in names:
        del config[name]
    return {**config, "architectures": ["DFlashDraftModel"], "dflash_config": nested}, tensors


def write_zlab(checkpoint: DraftCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of z-lab's `DFlashDraftModel`: embedding and head are the target's.

    Raises:
        ValueError: the draft is more than that class can say.
    """
    if W1 in checkpoint.shapes or checkpoint.slot_rule != "shifted":
        raise ValueError(
            "z-lab's class is a DFlash whose anchor predicts nothing, and this draft is not: "
            "export it as deepspec, speculators or gguf"
        )
    if "d2t" in checkpoint.shapes:
        raise ValueError("z-lab has no reduced vocabulary: export this draft as speculators")
    config, tensors = write_own(checkpoint)
    return config, {name: tensor for name, tensor in tensors.items() if name not in SHARED}


def eagle3(
    raw: Mapping[str, Any],
    tensors: dict[str, Tensor],
    source: str,
    project: str,
    target_depth: int | None,
) -> DraftCheckpoint:
    """An EAGLE-3 draft, from any config that has its fields at the top level."""
    tensors = {_first_layer(name): tensor for name, tensor in tensors.items()}
    nested = raw.get("eagle_config") or {}
    config = {**raw, **nested}
    config["target_layer_ids"], guessed = _eagle3_taps(raw, target_depth)
    config.setdefault("ttt_length", EAGLE3_STEPS)
    # Older configs do not say; one that says so and has no tensor is refused when it is taken.
    config["fc_norm"] = config.get("fc_norm") or "fc_norm.0.weight" in tensors
    config["norm_before_fc"] = config.get("norm_before_fc") or "input_norm.weight" in tensors
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    config["num_hidden_layers"] = len(layers) or config.get("num_hidden_layers", 1)
    return DraftCheckpoint(
        source=source,
        dialect=f"{project} (EAGLE-3)",
        config={**config, "architectures": ["Qwen3Eagle3Model"]},
        shapes=shapes_of(tensors),
        load=lambda: from_tensors(tensors, source),
        layers_guessed=guessed,
    )


def _first_layer(name: str) -> str:
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _eagle3_taps(raw: Mapping[str, Any], target_depth: int | None) -> tuple[list[int], bool]:
    """0-based outputs, and whether they are a guess.

    `target_layer_ids` and the nested `eagle_config.eagle_aux_hidden_state_layer_ids` name layers by
    their outputs. The same name at the top level, and the layers that are the default where a file
    names none, mean the layer that reads the state: one more. Nested ids that equal those defaults
    may have been copied from them, so that they follow either count.
    """
    nested = raw.get("eagle_config") or {}
    named = nested.get("target_layer_ids") or raw.get("target_layer_ids")
    if named:
        return [int(layer) for layer in named], False
    depth = raw.get("num_target_layers") or target_depth
    outputs = [int(layer) for layer in nested.get(AUX_LAYERS) or ()]
    if outputs:
        # Without a depth: the one that the last of three would follow from.
        return outputs, outputs == _default_readers(int(depth or outputs[-1] + 3))
    readers = raw.get(AUX_LAYERS)
    if not readers:
        if depth is None:
            raise ValueError(
                "it names no target layers: they follow from the target's depth, so name the "
                "target (--model)"
            )
        readers = _default_readers(int(depth))
    return [int(layer) - 1 for layer in readers], False


def _default_readers(depth: int) -> list[int]:
    """Layers that read the tapped states where an EAGLE-3 file names none."""
    return [2, depth // 2, depth - 3]


def _mask_token(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
    found = [nested.get("mask_token_id"), *(raw.get(name) for name in MASK_FIELDS)]
    for value in found:
        if value is not None:
            return int(value)
    raise KeyError("mask_token_id")


def _slot_rule(
    name: str, nested: Mapping[str, Any], has_markov: bool
) -> tuple[SlotRule, str, bool]:
    """The rule, the reason for people, and whether it is a guess."""
    if name in DSPARK_CLASSES:
        return "anchor", f"{name} predicts from the anchor on", False
    if nested.get("projector_type") == "dspark":
        return "anchor", "projector_type dspark predicts from the anchor on", False
    if has_markov:
        return "anchor", f"it has a Markov head, though {name} is a class without", True
    return "shifted", f"{name} predicts nothing at the anchor", False
