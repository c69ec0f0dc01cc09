"""What a Llama-shaped checkpoint's config.json says, read completely or refused.

Owns the list of architectures and of config fields: every field is honoured, known to change no
result, or an error that names it. Must not know tensors' values, pages or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from emberline.batch import KVSpec
from emberline.models.activation import activation
from emberline.models.decoder_fields import LlamaFields, MistralFields, Qwen2Fields, Qwen3Fields
from emberline.models.rotary import RopeTable, rope_from_config
from emberline.models.weights import ModelError

_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaFields,
    "mistral": MistralFields,
    "qwen2": Qwen2Fields,
    "qwen3": Qwen3Fields,
}
SUPPORTED_MODEL_TYPES = tuple(_CONFIGS)

_HONOURED = frozenset(
    {
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta",
        "rope_scaling", "rope_parameters", "original_max_position_embeddings", "sliding_window",
    }
)  # fmt: skip
_HONOURED_BY_TYPE: dict[str, frozenset[str]] = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "mistral": frozenset(),
    "qwen2": frozenset({"use_sliding_window", "max_window_layers", "layer_types"}),
    "qwen3": frozenset(
        {"attention_bias", "use_sliding_window", "max_window_layers", "layer_types"}
    ),
}
_HARMLESS = frozenset(
    {
        # Bookkeeping, files and ids: the tokenizer's business or nobody's.
        "_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype",
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
        "decoder_start_token_id", "id2label", "label2id", "num_labels", "name_or_path",
        "tokenizer_class", "task_specific_params", "problem_type", "finetuning_task", "auto_map",
        "prefix", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
        "_flash_attn_2_enabled", "unsloth_fixed", "unsloth_version", "transformers.js_config",
        # How it was trained, started or is run: no part of inference.
        "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
        "use_cache", "cache_implementation", "gradient_checkpointing", "is_llama_config",
        "torchscript", "use_bfloat16", "return_dict", "output_attentions",
        "output_hidden_states", "chunk_size_feed_forward",
    }
)  # fmt: skip
# Fields that are harmless at one value only.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False, None),
    "pretraining_tp": (1, None),
    "pruned_heads": ({}, None),
    "use_mrope": (False, None),
    "partial_rotary_factor": (1.0, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "quantization": (None,),
    "logit_scale": (1.0, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder-only model of the Llama shape."""

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # by layer; tokens seen, itself included
    rope: RopeTable
    context_len: int  # most tokens a sequence may have, as far as the checkpoint says

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Read a config.json.

        Raises:
            ModelError: an architecture, field or value that this decoder does not implement.
        """
        model_type = str(raw.get("model_type"))
        if model_type not in _CONFIGS:
            raise ModelError(
                f"model_type {model_type!r} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        _refuse_unknown(model_type, raw)
        hf = _parse(model_type, raw)
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
        if heads % kv_heads:
            raise ModelError(f"{heads} attention heads do not share {kv_heads} key-value heads")
        activation(hf.hidden_act)
        rope = rope_from_config(hf)
        return cls(
            model_type=model_type,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(hf),
            rms_norm_eps=hf.rms_norm_eps,
            hidden_act=hf.hidden_act,
            qkv_bias=model_type == "qwen2" or bool(getattr(hf, "attention_bias", False)),
            out_bias=bool(getattr(hf, "attention_bias", False)),
            mlp_bias=bool(getattr(hf, "mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            tied_embeddings=hf.tie_word_embeddings,
            sliding_windows=_sliding_windows(model_type, hf),
            rope=rope,
            context_len=min(hf.max_position_embeddings, rope.max_len or 2**62),
        )

    @property
    def kv_spec(self) -> KVSpec:
        """KV that the model keeps in the pages."""
        windows = [window for window in self.sliding_windows if window is not None]
        all_slide = len(windows) == len(self.sliding_windows)
        return KVSpec(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            window=max(windows) if all_slide else None,
        )


def _refuse_unknown(model_type: str, raw: Mapping[str, Any]) -> None:
    honoured = _HONOURED | _HONOURED_BY_TYPE[model_type]
    if model_type == "llama":
        honoured -= {"sliding_window"}  # transformers' Llama has none
    for name, value in raw.items():
        if name in honoured:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ModelError(f"config field {name} = {value!r} is not implemented")
        elif name not in _HARMLESS:
            raise ModelError(f"config field {name!r} ({value!r}) is not known to this decoder")


def _parse(model_type: str, raw: Mapping[str, Any]) -> Any:
    kept = {k: v for k, v in raw.items() if k not in _HARMLESS and k != "model_type"}
    log = logging.getLogger("transformers")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        return _CONFIGS[model_type](**kept)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"config of {model_type} is not valid: {reason}") from error
    finally:
        log.setLevel(level)


def _head_dim(hf: Any) -> int:
    explicit = getattr(hf, "head_dim", None)
    return int(explicit or hf.hidden_size // hf.num_attention_heads)


def _sliding_windows(model_type: str, hf: Any) -> tuple[int | None, ...]:
    num_layers: int = hf.num_hidden_layers
    if model_type == "llama":
        return (None,) * num_layers
    if model_type == "mistral":
        return (hf.sliding_window,) * num_layers
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise ModelError(
            f"layer_types names {len(hf.layer_types)} of {hf.num_hidden_layers} layers"
        )
    windows: list[int | None] = []
    for kind in hf.layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"layer_types: {kind!r} is not implemented")
        if kind == "sliding_attention" and hf.sliding_window is None:
            raise ModelError("layer_types names sliding_attention, but there is no sliding_window")
        windows.append(hf.sliding_window if kind == "sliding_attention" else None)
    return tuple(windows)
