"""Tiny GGUF files written from tiny random transformers models, tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["\u0120 t", "h e", "\u0120t he", "1 2"]  # the last is unreachable if digits are split
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "\u0120t", "he", "\u0120the", "12"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}"
)
SHAPE = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_model(architecture: str = "llama", **changes: Any) -> torch.nn.Module:
    """A random model in float32; `changes` go to its config."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    settings = {**SHAPE, "rope_parameters": rope, "tie_word_embeddings": True, **changes}
    if architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**settings, head_dim=16))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings))
    for parameter in model.parameters():  # biases and norms too, so that a swap shows
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def gguf_name(name: str) -> str:
    stem, _, field = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{field}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{field}"


def interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order of q and k in llama GGUF files: the two halves of a head alternate."""
    out = torch.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        block = rows[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = block[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = block[size // 2 :]
    return out


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str | None = None,
    pre: str = "smollm",
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    skip: tuple[str, ...] = (),
) -> Path:
    """Write `model` as a llama.cpp converter would; matrices are stored as `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    add_byte_level_vocabulary(writer, pre)
    for key, value in (extra or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            key, value
        )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, config.num_key_value_heads)
        if gguf_name(name) not in skip:
            add_tensor(writer, gguf_name(name), tensor.numpy(), kind)
    for name, array in (extra_tensors or {}).items():
        add_tensor(writer, name, array, gguf.GGMLQuantizationType.F32)
    return finish(writer, path)


def add_byte_level_vocabulary(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def add_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
