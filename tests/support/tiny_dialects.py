"""Tiny drafts spelt as each dialect is described, independently of the writers under test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from emberline.config import SlotRule
from emberline.drafters import Drafter
from emberline.drafters.checkpoint import load_drafter

from support.drafter_world import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LENGTHS,
    PAGE_SIZE,
    PAGES_PER_REQ,
    VOCAB,
    WIDE,
    TinyTarget,
)
from support.tiny_draft import (
    DFLASH,
    ZLAB,
    draft_config,
    draft_tensors,
)
from support.tiny_eagle3 import STEPS, eagle3_config, eagle3_tensors
from support.tiny_gguf import interleave

Config, Tensors = dict[str, Any], dict[str, Tensor]
HEAD_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head")
LAYER_TYPE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
)
KNOWN = (0, 3, 4, 11, 20, 21, 22, 38)  # tokens of a reduced vocabulary


@dataclass(frozen=True)
class Example:
    """A draft in DeepSpec's spelling, and how a dialect spells it."""

    config: Config
    tensors: Tensors
    write: Callable[[Path, Config, Tensors], Path]
    dialect: str
    slot_rule: SlotRule | None
    original: Config = field(default_factory=dict)  # where DeepSpec cannot say it: another config


def folder_of(path: Path, config: Config, tensors: Tensors) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    return path


def as_specforge(path: Path, config: Config, tensors: Tensors) -> Path:
    names = ("target_layer_ids", "mask_token_id", *HEAD_FIELDS, "confidence_head_with_markov")
    nested = {name: config.pop(name) for name in names} | {"projector_type": "dspark"}
    raw = {**config, "architectures": ["DSparkDraftModel"], "dflash_config": nested}
    return folder_of(path, raw, tensors)


def as_legacy_specforge(path: Path, config: Config, tensors: Tensors) -> Path:
    heads = ("markov_head.", "confidence_head.")
    named = {f"logit_head.{n}" if n.startswith(heads) else n: t for n, t in tensors.items()}
    return as_specforge(path, config, named)


def as_zlab(path: Path, config: Config, tensors: Tensors) -> Path:
    names = ("target_layer_ids", "mask_token_id", "block_size")
    nested = {name: config.pop(name) for name in names}
    raw = {
        n: v for n, v in config.items() if n not in (*HEAD_FIELDS, "confidence_head_with_markov")
    }
    return folder_of(
        path, {**raw, "architectures": ["DFlashDraftModel"], "dflash_config": nested}, tensors
    )


def as_nemo(path: Path, config: Config, tensors: Tensors) -> Path:
    own = ("lm_head.weight", "d2t", "t2d")
    named = {n if n in own else f"model.{n}": t for n, t in tensors.items()}
    mask = config.pop("mask_token_id")
    return folder_of(path, {**config, "dspark_noise_token_id": mask}, named)


def layer_config(config: Config, model_type: str) -> Config:
    return {name: config[name] for name in LAYER_TYPE_FIELDS} | {"model_type": model_type}


def as_speculators(path: Path, config: Config, tensors: Tensors) -> Path:
    kind = "dspark" if "markov_head.markov_w1.weight" in tensors else "dflash"
    raw = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": {n: config[n] for n in LAYER_TYPE_FIELDS}
        | {"model_type": "qwen3"},
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else VOCAB,
        "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        "mask_token_id": config["mask_token_id"],
        "sample_from_anchor": config.get("sample_from_anchor", True),
        "speculators_config": {"algorithm": kind},
    }
    return folder_of(path, raw, {**tensors, "mask_embedding": torch.zeros(HIDDEN)})


def as_old_speculators(path: Path, config: Config, tensors: Tensors) -> Path:
    folder = as_speculators(path, config, tensors)
    raw = json.loads((folder / "config.json").read_text())
    del raw["sample_from_anchor"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


GGUF_NAMES = {
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "d2t":
        return name
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{GGUF_LAYER_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES.get(stem, stem)}.{kind}"


def gguf_writer(path: Path, architecture: str, config: Config) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    return writer


def finish_gguf(writer: gguf.GGUFWriter, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        kept = tensor if tensor.dtype == torch.int64 else tensor.float()
        writer.add_tensor(gguf_name(name), kept.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_gguf(path: Path, config: Config, tensors: Tensors) -> Path:
    path = path.with_suffix(".gguf")
    writer = gguf_writer(path, "dflash", config)
    writer.add_causal_attention(False)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in config["target_layer_ids"]])
    writer.add_uint32("dflash.block_size", config["block_size"])
    writer.add_mask_token_id(config["mask_token_id"])
    if "d2t" in tensors:
        tensors = {**tensors, "d2t": torch.tensor(KNOWN)}
    finish_gguf(writer, tensors)
    return path


def as_eagle3_gguf(path: Path, config: Config, tensors: Tensors) -> Path:
    path = path.with_suffix(".gguf")
    writer = gguf_writer(path, "eagle3", config)
    writer.add_array("eagle3.extract_layers", [layer + 1 for layer in config["target_layer_ids"]])
    writer.add_uint32("eagle3.target_hidden_size", HIDDEN)
    writer.add_vocab_size(VOCAB)
    tensors = dict(tensors)
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = interleave(tensors[name], heads)
    finish_gguf(writer, tensors)
    return path


def as_specforge_eagle3(path: Path, config: Config, tensors: Tensors) -> Path:
    named = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    layers = config.pop("target_layer_ids")
    raw = {**config, "architectures": ["LlamaForCausalLMEagle3"]}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    return folder_of(path, raw, named)


def as_nemo_eagle3(path: Path, config: Config, tensors: Tensors) -> Path:
    own = ("lm_head.weight", "d2t", "t2d")
    named = {n if n in own else f"model.{n}": t for n, t in tensors.items()}
    return folder_of(path, {**config, "architectures": ["LlamaEagle3DraftModel"]}, named)


def as_speculators_eagle3(path: Path, config: Config, tensors: Tensors) -> Path:
    raw = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {n: config[n] for n in LAYER_TYPE_FIELDS}
        | {"model_type": "llama"},
        "draft_vocab_size": config.get("draft_vocab_size", VOCAB),
        "norm_before_residual": config.get("norm_before_residual", False),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": STEPS}]
        },
    }
    return folder_of(path, raw, tensors)


def reduced_tensors(head: str | None = "vanilla") -> Tensors:
    """A draft that knows 8 tokens of 40."""
    generator = torch.Generator().manual_seed(8)
    known = torch.tensor(KNOWN)
    tensors = draft_tensors(head)
    marked = torch.zeros(VOCAB, dtype=torch.bool)
    marked[known] = True
    tensors |= {
        "lm_head.weight": torch.randn(len(KNOWN), HIDDEN, generator=generator),
        "d2t": known - torch.arange(len(KNOWN)),
        "t2d": marked,
    }
    if head is not None:
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][known]
    return tensors


def without_t2d(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "t2d"}


PLAIN = draft_config()
EAGLE3 = eagle3_config()
LLAMA = eagle3_tensors(qk_norm=False)
REDUCED_EAGLE3 = eagle3_tensors(qk_norm=False, draft_vocab=8)

EXAMPLES: dict[str, Example] = {
    "specforge": Example(PLAIN, draft_tensors(), as_specforge, "SpecForge", "anchor"),
    "specforge-legacy": Example(
        PLAIN, draft_tensors("gated"), as_legacy_specforge, "SpecForge", "anchor"
    ),
    "z-lab": Example(
        draft_config(**DFLASH),
        draft_tensors(None),
        as_zlab,
        "z-lab",
        "shifted",
        draft_config(**ZLAB),
    ),
    "nemo": Example(PLAIN, draft_tensors("rnn"), as_nemo, "DeepSpec", "anchor"),
    "nemo-dflash": Example(
        draft_config(**ZLAB),
        draft_tensors(None),
        lambda path, config, tensors: folder_of(
            path,
            {**config, "architectures": ["Qwen3DFlashDraftModel"]},
            {f"model.{n}": t for n, t in tensors.items()},
        ),
        "NeMo",
        "shifted",
        draft_config(**ZLAB),
    ),
    "speculators": Example(
        PLAIN, draft_tensors(), as_speculators, "speculators (dspark)", "anchor"
    ),
    "speculators-dflash": Example(
        {**draft_config(**DFLASH), "sample_from_anchor": False},
        draft_tensors(None),
        as_speculators,
        "speculators (dflash)",
        "shifted",
        draft_config(**ZLAB),
    ),
    "speculators-old": Example(
        draft_config(**DFLASH),
        draft_tensors(None),
        as_old_speculators,
        "speculators (dflash)",
        "shifted",
        draft_config(**ZLAB),
    ),
    "speculators-reduced": Example(
        PLAIN, reduced_tensors(), as_speculators, "speculators (dspark)", "anchor"
    ),
    "gguf": Example(PLAIN, draft_tensors(), as_gguf, "GGUF (dflash)", "anchor"),
    "gguf-bias": Example(
        draft_config(attention_bias=True),
        draft_tensors(bias=True),
        as_gguf,
        "GGUF (dflash)",
        "anchor",
    ),
    "gguf-dflash": Example(
        draft_config(**DFLASH),
        draft_tensors(None),
        as_gguf,
        "GGUF (dflash)",
        "shifted",
        draft_config(**ZLAB),
    ),
    "gguf-reduced": Example(
        PLAIN, without_t2d(reduced_tensors()), as_gguf, "GGUF (dflash)", "anchor"
    ),
    "eagle3-specforge": Example(EAGLE3, LLAMA, as_specforge_eagle3, "SpecForge (EAGLE-3)", None),
    "eagle3-nemo": Example(EAGLE3, LLAMA, as_nemo_eagle3, "NeMo (EAGLE-3)", None),
    "eagle3-speculators": Example(
        eagle3_config(draft_vocab_size=8, norm_before_residual=True),
        REDUCED_EAGLE3,
        as_speculators_eagle3,
        "speculators (EAGLE-3)",
        None,
    ),
    "eagle3-gguf": Example(
        eagle3_config(ttt_length=7), LLAMA, as_eagle3_gguf, "GGUF (eagle3)", None
    ),
}


def drafter_of(path: Path, **options: Any) -> Drafter:
    return load_drafter(
        path,
        TinyTarget(),
        dtype=torch.float32,
        device="cpu",
        num_pages=1 + len(LENGTHS) * PAGES_PER_REQ,
        page_size=PAGE_SIZE,
        **options,
    )
