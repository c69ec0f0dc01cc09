"""Targets and drafts of a real model's shape with random weights, made on the device.

Owns the shapes, the tensors and the way they take the place of files: a folder holds the configs
alone, and whoever would read weights from it gets these. Must not know what is measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from emberline.models.weights import Weights

READERS = ("emberline.models.load.load_folder", "emberline.drafters.dialects.detect.load_folder")
SCALE = 0.02  # of random matrices, as models are initialised


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Geometry of a target and of the DSpark draft beside it, whose layers are as wide."""

    name: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the head is the embedding
    draft_layers: int
    block: int  # drafts
    rank: int  # of the sequential head

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers that the draft reads, spread over the depth."""
        last = self.layers - 1
        return tuple(sorted({last * part // 4 for part in range(5)}))

    def target_config(self) -> dict[str, object]:
        """The target's config.json."""
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": self.tied,
        }

    def draft_config(self) -> dict[str, object]:
        """The draft's config.json."""
        target = self.target_config()
        return {
            **{key: target[key] for key in target if key != "tie_word_embeddings"},
            "model_type": "qwen3",
            "architectures": ["Qwen3DSparkModel"],
            "num_hidden_layers": self.draft_layers,
            "num_target_layers": self.layers,
            "target_layer_ids": list(self.taps),
            "block_size": self.block,
            "mask_token_id": 3,
            "markov_rank": self.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
        }

    def target_shapes(self) -> dict[str, tuple[int, ...]]:
        """The target's tensors."""
        shapes = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= self._layer(f"model.layers.{layer}.", qk_norm=self.model_type == "qwen3")
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def draft_shapes(self) -> dict[str, tuple[int, ...]]:
        """The draft's tensors. Embedding and head are the target's."""
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (self.hidden, len(self.taps) * self.hidden),
            "hidden_norm.weight": (self.hidden,),
            "norm.weight": (self.hidden,),
            "markov_head.markov_w1.weight": (self.vocab, self.rank),
            "markov_head.markov_w2.weight": (self.vocab, self.rank),
            "confidence_head.proj.weight": (1, self.hidden + self.rank),
            "confidence_head.proj.bias": (1,),
        }
        for layer in range(self.draft_layers):
            shapes |= self._layer(f"layers.{layer}.", qk_norm=True)
        return shapes

    def _layer(self, at: str, *, qk_norm: bool) -> dict[str, tuple[int, ...]]:
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, wide = self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (width, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, width),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        if qk_norm:
            shapes |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        return {f"{at}{name}.weight": shape for name, shape in shapes.items()}

    @property
    def step_numbers(self) -> int:
        """Weights that a target's step reads: all, but of an embedding a few rows only."""
        shapes = self.target_shapes()
        if not self.tied:
            del shapes["model.embed_tokens.weight"]
        return sum(math.prod(shape) for shape in shapes.values())


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("8B", "qwen3", 36, 4096, 12288, 32, 8, 128, 151_936, False, 5, 7, 256),
        ModelShape("135M", "llama", 30, 576, 1536, 9, 3, 64, 49_152, True, 4, 7, 32),
        ModelShape("tiny", "qwen3", 3, 32, 48, 4, 2, 8, 128, False, 1, 4, 8),
    )
}


def fill(
    shapes: Mapping[str, tuple[int, ...]], device: str, dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Random matrices, and norms of one."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name:
            tensors[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            tensors[name] = torch.randn(shape, dtype=dtype, device=device, generator=generator)
            tensors[name] *= SCALE
    return tensors


@contextmanager
def random_folders(
    shape: ModelShape, scratch: Path, device: str, dtype: torch.dtype
) -> Iterator[tuple[Path, Path]]:
    """Folders of a target and its draft, to be loaded from while this lasts.

    Args:
        shape: of both.
        scratch: an empty folder for their configs.
        device: where the tensors are made.
        dtype: of the tensors.
    """
    folders = scratch / "target", scratch / "draft"
    contents = (
        (shape.target_config(), shape.target_shapes()),
        (shape.draft_config(), shape.draft_shapes()),
    )
    tensors = {}
    for seed, (folder, (config, shapes)) in enumerate(zip(folders, contents, strict=True)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        tensors[folder] = fill(shapes, device, dtype, seed)
    with ExitStack() as stack:
        for reader in READERS:
            stack.enter_context(
                mock.patch(reader, lambda folder: Weights(tensors[folder], folder.name))
            )
        yield folders
