"""A draft written as one GGUF file.

Owns what such a file can say of a draft, and how. The names are `gguf.py`'s. Matrices are stored as
they come (float32, float16 or bfloat16), vectors as float32, as llama.cpp wants them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from emberline.drafters.dialects.canonical import (
    CONFIDENCE,
    SHARED,
    W1,
    W2,
    DraftCheckpoint,
    unused,
)
from emberline.drafters.dialects.gguf import (
    BLOCK_TOP_NAMES,
    EAGLE3_LAYER_NAMES,
    TOP_NAMES,
    join_pairs,
)
from emberline.models.gguf_convert import LAYER_NAMES

HEAD = SHARED[1]
COMMON_ROPE_KEYS = {"rope_type", "type", "rope_theta"}
ROPE_KEYS = {
    "default": COMMON_ROPE_KEYS,
    "linear": COMMON_ROPE_KEYS | {"factor"},
    "yarn": COMMON_ROPE_KEYS
    | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
}
"""Rotary settings that a file has a key for, by kind."""
BRING_ALONG = "tokenizer."  # keys of a target's file that llama.cpp wants in its draft's


def write_gguf(
    path: Path,
    checkpoint: DraftCheckpoint,
    tokenizer: Mapping[str, Any],
    own: Collection[str] = (),
) -> None:
    """Write the draft.

    Args:
        path: the file.
        checkpoint: the draft.
        tokenizer: the target's metadata, where it came from a GGUF file: the keys of its tokenizer
            go along. Empty: a file without a vocabulary.
        own: names of `SHARED` that the file holds; the others are left to the target. The head of
            a reduced vocabulary always goes along.

    Raises:
        ValueError: the format cannot say this draft.
    """
    config, tensors = checkpoint.config, _tensors(checkpoint, own)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"GGUF has no hidden_act {activation!r}, only silu: export as deepspec")
    eagle3 = checkpoint.slot_rule is None
    architecture = "eagle3" if eagle3 else "dflash"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(int(config.get("max_position_embeddings") or 4096))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(int(config["num_attention_heads"]))
    writer.add_head_count_kv(int(config["num_key_value_heads"]))
    writer.add_key_length(int(config["head_dim"]))
    writer.add_value_length(int(config["head_dim"]))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    _add_rope(writer, config)
    if config.get("final_logit_softcapping") is not None:
        writer.add_final_logit_softcapping(float(config["final_logit_softcapping"]))
    layers = [int(layer) + 1 for layer in config["target_layer_ids"]]
    if eagle3:
        _add_eagle3(writer, config, layers)
    else:
        writer.add_causal_attention(False)
        writer.add_array("dflash.target_layers", layers)
        writer.add_uint32("dflash.block_size", int(config["block_size"]))
    _add_tokenizer(writer, config, tokenizer)
    for name, tensor in tensors.items():
        _add_tensor(writer, _file_name(name, eagle3), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: DraftCheckpoint, own: Collection[str]) -> dict[str, Tensor]:
    """The draft's tensors as the file has them, under DeepSpec's names."""
    config, weights = checkpoint.config, checkpoint.load()
    tensors = {name: weights.take(name) for name in weights.names()}
    reduced = weights.has("d2t")
    left = [name for name in SHARED if name not in own and not (reduced and name == HEAD)]
    for name in (*unused(tensors), "t2d", *left):
        tensors.pop(name, None)
    if reduced:
        offsets = tensors["d2t"].long()
        tensors["d2t"] = offsets + torch.arange(len(offsets))
    _check(tensors)
    if checkpoint.slot_rule is None:
        for name in list(tensors):
            for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                if f".{part}_proj." in name:
                    tensors[name] = join_pairs(tensors[name], int(config[heads]))
        return tensors
    return _dspark(checkpoint, tensors)


def _check(tensors: Mapping[str, Tensor]) -> None:
    for name in tensors:
        if name.startswith(("markov_head.gate_proj", "markov_head.joint_proj")):
            kind = "gated" if "gate_proj" in name else "rnn"
            raise ValueError(
                f"GGUF has the vanilla Markov head alone, this draft's is {kind}: export it as "
                "deepspec or speculators"
            )
        if name.endswith("pre_feedforward_layernorm.weight"):
            raise ValueError("GGUF has no Gemma 4 draft: export it as deepspec")
        if name.startswith(("fc_norm.", "input_norm.")):
            raise ValueError(f"GGUF has no {name}: export this draft as speculators")


def _dspark(checkpoint: DraftCheckpoint, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The heads, in the shape the file tells the slot rule by.

    A file with a Markov head predicts from the anchor on, one without does not. A draft that
    predicts from there without such a head gets one of zeros, which adds nothing to its logits.
    """
    config, from_anchor = checkpoint.config, checkpoint.slot_rule == "anchor"
    if W1 in tensors and not from_anchor:
        raise ValueError(
            "GGUF has no Markov head whose anchor predicts nothing: export it as speculators"
        )
    if W1 not in tensors and from_anchor:
        like, vocab = tensors["fc.weight"], int(config["vocab_size"])
        columns = len(tensors["d2t"]) if "d2t" in tensors else vocab
        tensors[W1] = like.new_zeros(vocab, 1)
        tensors[W2] = like.new_zeros(columns, 1)
    if CONFIDENCE in tensors:
        # The file's row always sees the previous token: zeros for one that does not.
        row = tensors[CONFIDENCE]
        width = int(config["hidden_size"]) + tensors[W1].shape[1]
        tensors[CONFIDENCE] = torch.nn.functional.pad(row, (0, width - row.shape[1]))
    return tensors


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KEYS:
        raise ValueError(f"GGUF has no rotary embedding of type {kind!r}: export as deepspec")
    _check_rope(rope, kind)
    writer.add_rope_dimension_count(int(config["head_dim"]))
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config["rope_theta"]))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        for name, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(name) is not None:
                add(float(rope[name]))


def _check_rope(rope: Mapping[str, Any], kind: str) -> None:
    """Refuse settings that the file has no key for, unless they are what its reader assumes."""
    assumed: dict[str, Any] = {"partial_rotary_factor": 1.0}
    if kind == "yarn":
        scale = max(float(rope["factor"]), 1.0)
        assumed |= {"truncate": True, "attention_factor": 0.1 * math.log(scale) + 1}
    for name, value in rope.items():
        if name in ROPE_KEYS[kind] or value is None or value == assumed.get(name):
            continue
        raise ValueError(f"GGUF cannot say {name} {value!r} of {kind} rotary: export as deepspec")


def _add_eagle3(writer: gguf.GGUFWriter, config: Mapping[str, Any], layers: list[int]) -> None:
    if len(layers) != 3 or int(config["num_hidden_layers"]) != 1:
        raise ValueError(
            f"GGUF's EAGLE-3 has 3 taps and 1 layer, this draft {len(layers)} and "
            f"{config['num_hidden_layers']}: export it as speculators"
        )
    if config.get("norm_output"):
        raise ValueError("GGUF's EAGLE-3 has no norm_output: export this draft as speculators")
    writer.add_array("eagle3.extract_layers", layers)
    width = int(config.get("target_hidden_size") or config["hidden_size"])
    writer.add_uint32("eagle3.target_hidden_size", width)
    writer.add_bool("eagle3.norm_before_residual", bool(config.get("norm_before_residual")))


def _add_tokenizer(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    keys = {key: value for key, value in metadata.items() if key.startswith(BRING_ALONG)}
    keys.pop("tokenizer.ggml.mask_token_id", None)
    if not keys:
        writer.add_tokenizer_model("none")
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            adders[type(value)](key, value)
    if config.get("mask_token_id") is not None:
        writer.add_mask_token_id(int(config["mask_token_id"]))


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
        kind = gguf.GGMLQuantizationType.BF16
        raw = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
    elif (tensor.dtype == torch.float16 and tensor.dim() > 1) or tensor.dtype == torch.int64:
        writer.add_tensor(name, tensor.numpy())
    else:
        writer.add_tensor(name, tensor.float().numpy())


def _file_name(name: str, eagle3: bool) -> str:
    top = {short: long for long, short in {**TOP_NAMES, **BLOCK_TOP_NAMES}.items()}
    layer_names = EAGLE3_LAYER_NAMES if eagle3 else LAYER_NAMES
    parts = {short: long for long, short in layer_names.items()}
    if name in top:
        return top[name]
    stem, _, field = name.rpartition(".")
    _, layer, part = stem.split(".", 2)
    if part not in parts:
        raise ValueError(f"GGUF has no place for {name}: export this draft as deepspec")
    return f"blk.{layer}.{parts[part]}.{field}"
