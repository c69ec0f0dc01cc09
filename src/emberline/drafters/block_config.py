"""Geometry of a block draft, as its config file states it.

Owns the facts that backbone, heads and loaders agree on. Must not know tensors or files.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.batch import KVSpec
from emberline.models.rotary import RopeTable
from emberline.ops.gated import Activation


@dataclass(frozen=True, slots=True)
class BlockStyle:
    """How a layer computes, where families differ. The defaults are Qwen3's."""

    activation: Activation = "silu"
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    values_are_keys: bool = False  # no v_proj: values are what k_proj gives, before its norm
    norm_values: bool = False  # values are normalised, without a weight
    sandwich_norms: bool = False  # attention and MLP have a norm behind as well as before
    layer_scalar: bool = False  # a layer's output is scaled by a number of its own


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Geometry of a block draft, from its config file alone."""

    algorithm: str  # name of the drafter's class in `emberline.drafters.DRAFTERS`
    vocab_size: int | None  # V, the target's; None if the file does not say
    hidden_size: int  # D, the target's as well
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeTable
    attention_bias: bool
    block_size: int  # slots that see each other, the anchor's included
    anchor_predicts: bool  # True: slot k predicts anchor + k + 1; False: slot j predicts anchor + j
    mask_token_id: int
    taps: tuple[int, ...]  # target layers (0-based) whose output is the context; -1 = embeddings
    num_target_layers: int | None  # depth of the target it was trained for, where stated
    markov_rank: int  # as the config states it; 0 = no sequential head
    has_confidence: bool  # as the config states it
    style: BlockStyle = BlockStyle()
    embed_scale: float = 1.0  # of its own embedding
    logit_softcap: float | None = None  # of its own head: tanh(logits / cap) * cap

    @property
    def max_draft_tokens(self) -> int:
        """K, the most drafts a block yields."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def kv_spec(self) -> KVSpec:
        """KV that the draft keeps in the target's pages."""
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim)
