"""A GGUF file turned into a Hugging Face model folder: config, weights, tokenizer, stop ids.

Owns what keys and tensors of the Llama, Qwen2 and Qwen3 architectures mean. It must not know
where folders are kept. Values are stored as they are: quantised tensors become float32, since
their values do not fit a narrower type, and float16 or bfloat16 tensors stay so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from emberline.models.gguf_file import GGUFFile, GGUFTensor, read_gguf
from emberline.models.gguf_rope import ROPE_FREQS, rope_parameters
from emberline.models.gguf_tokenizer import save_tokenizer, special_ids, stop_ids
from emberline.models.weights import INDEX_FILE, SINGLE_FILE, ModelError

__all__ = ["Progress", "convert_gguf"]

Progress = Callable[[int, int], None]  # tensors done, tensors in all

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Settings that change the arithmetic and that the three classes above have no place for.
FOREIGN_KEYS = (
    "attention.scale",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)
SHARD_BYTES = 2 * 1024**3


def convert_gguf(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the model in ``source`` into the existing, empty ``folder``.

    Raises:
        ModelError: the file cannot be read, or its architecture, tokenizer, position scaling or
            one of its tensors is not supported; the message says which.
    """
    file = read_gguf(source)
    try:
        config = _config(file)
        plan = _plan(file, config)
        save_tokenizer(file.metadata, folder)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(file.metadata))
    _save_weights(plan, config, folder, progress)


class _Keys:
    """Typed access to the metadata keys of the file's architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.metadata = file.metadata
        self.architecture = file.metadata.get("general.architecture")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"expected one integer for {key}, found {_shorten(value)}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, (int, float)):
            raise ModelError(f"expected a number for {key}, found {_shorten(value)}")
        # The file holds float32: the shortest decimal that rounds to it is what was meant.
        return float(str(np.float32(value)))


def _config(file: GGUFFile) -> dict[str, Any]:
    keys = _Keys(file)
    if keys.architecture not in CLASSES:
        raise ModelError(
            f"architecture {keys.architecture!r} cannot be converted ({', '.join(CLASSES)} can); "
            f"use the Hugging Face folder of the model"
        )
    for key in FOREIGN_KEYS:
        if file.metadata.get(f"{keys.architecture}.{key}"):
            raise ModelError(f"a {keys.architecture} model with {key} set cannot be converted")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key, what in (("attention.value_length", "values"), ("rope.dimension_count", "rotary")):
        if (found := keys.integer(key, head_dim)) != head_dim:
            raise ModelError(f"head size {head_dim} but {what} of size {found}: not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelError("tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [CLASSES[keys.architecture]],
        "model_type": keys.architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(file, keys.real("rope.freq_base", 10_000.0), head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _main_dtype(file),
    }
    if keys.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    elif keys.architecture == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config | _token_ids(file.metadata)


def _token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    ids, stops = special_ids(metadata), stop_ids(metadata)
    found: dict[str, Any] = {
        f"{key}_token_id": ids[key] for key in ("bos", "eos", "pad") if key in ids
    }
    if "eos" not in ids and stops:
        found["eos_token_id"] = stops[0]
    return found


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return _token_ids(metadata) | {"eos_token_id": stop_ids(metadata)}


def _main_dtype(file: GGUFFile) -> str:
    """The dtype of the matrices; norms are float32 in every file and do not count."""
    dtypes = {tensor.dtype for tensor in file.tensors.values() if len(tensor.shape) > 1}
    only = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return str(only).removeprefix("torch.")


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the config implies, under its Hugging Face name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    linear = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": s for name, s in linear.items()}
    layer |= {f"{name}.weight": (hidden,) for name in LAYER_NAMES.values() if "layernorm" in name}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
    with_bias = {name for name in linear if config.get(f"{_module(name)}_bias")}
    if config["model_type"] == "qwen2":
        with_bias |= {f"self_attn.{x}_proj" for x in "qkv"}
    layer |= {f"{name}.bias": linear[name][:1] for name in with_bias}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _module(linear_name: str) -> str:
    return "attention" if linear_name.startswith("self_attn") else "mlp"


def _plan(file: GGUFFile, config: dict[str, Any]) -> dict[str, GGUFTensor]:
    """The tensor of the file for every Hugging Face name; none missing, none left over."""
    expected = _expected_shapes(config)
    plan: dict[str, GGUFTensor] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FREQS:  # part of the config: rope_parameters has checked its values
            continue
        target = _target_name(name)
        if target not in expected:
            raise ModelError(f"tensor {name!r} has no place in a {config['model_type']} model")
        if tensor.shape != expected[target]:
            raise ModelError(
                f"tensor {name!r} has shape {list(tensor.shape)}, "
                f"the metadata ask for {list(expected[target])}"
            )
        plan[target] = tensor
    if missing := sorted(expected.keys() - plan.keys()):
        raise ModelError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    return plan


def _target_name(name: str) -> str | None:
    match = LAYER_TENSOR.fullmatch(name)
    if match is None:
        return TOP_NAMES.get(name)
    layer, part, field = match.groups()
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{field}" if part in LAYER_NAMES else None


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the interleaving of rotary pairs that llama GGUF files have in q and k rows.

    There, row 2i + j of a head is what Hugging Face keeps at row i + j * half.
    """
    rows = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape).contiguous()


def _load(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> torch.Tensor:
    values = tensor.load()
    if config["model_type"] == "llama":
        if ".q_proj." in name:
            return _unpermute(values, config["num_attention_heads"])
        if ".k_proj." in name:
            return _unpermute(values, config["num_key_value_heads"])
    return values


def _shards(plan: dict[str, GGUFTensor]) -> Iterator[list[str]]:
    """Names in runs of about SHARD_BYTES, so that no more than that is in memory at once."""
    run: list[str] = []
    size = 0
    for name, tensor in plan.items():
        num_bytes = int(np.prod(tensor.shape)) * tensor.dtype.itemsize
        if run and size + num_bytes > SHARD_BYTES:
            yield run
            run, size = [], 0
        run.append(name)
        size += num_bytes
    yield run


def _save_weights(
    plan: dict[str, GGUFTensor],
    config: dict[str, Any],
    folder: Path,
    progress: Progress | None,
) -> None:
    shards = list(_shards(plan))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = (
            SINGLE_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors[name] = _load(name, plan[name], config)
            weight_map[name] = file_name
            if progress is not None:
                progress(len(weight_map), len(plan))
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)  # the library makes it private to the user
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shorten(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
