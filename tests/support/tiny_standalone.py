"""A tiny language model with random weights, alone and as a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from emberline.drafters import Drafter
from emberline.drafters.checkpoint import load_drafter

from support.drafter_world import LENGTHS, PAGE_SIZE, PAGES_PER_REQ, VOCAB, TinyTarget


def save_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A Llama of two layers, sharp enough that its choices are not close."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(folder)
    return folder


def tiny_standalone(folder: Path, num_draft_tokens: int | None = None, **changes: Any) -> Drafter:
    return load_drafter(
        save_tiny_model(folder, **changes),
        TinyTarget(),
        dtype=torch.float32,
        device="cpu",
        num_pages=1 + len(LENGTHS) * PAGES_PER_REQ,
        page_size=PAGE_SIZE,
        num_draft_tokens=num_draft_tokens,
    )
