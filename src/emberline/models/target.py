"""The target protocol: what the engine needs of a model, and nothing more."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from emberline.batch import ForwardBatch, KVSpec, TargetOutput
from emberline.cache.kv_pool import KVPool


class Target(Protocol):
    """A causal language model over paged KV."""

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        ...

    @property
    def hidden_size(self) -> int:
        """Channels of a layer's output: of one tap. An embedding may have another width."""
        ...

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        ...

    @property
    def kv_spec(self) -> KVSpec | None:
        """All layers and how far they look; None for a target without KV (a table).

        Where layers differ in shape, heads and width are those of the largest.
        """
        ...

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """Where the KV is kept: a pool for each shape of a layer."""
        ...

    @property
    def row_granule(self) -> int:
        """Rows of a step come in multiples of this: what a token gets then depends on no count.

        Kernels should run what they are given, so that a step costs what its granules do.
        """
        ...

    def forward(self, batch: ForwardBatch) -> TargetOutput:
        """Run one step: write KV of every token, return logits of every scored one and the taps."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings, shared with the drafter. [...] int64 -> [..., D]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of normed hidden states, shared with the drafter. [N, D] -> [N, V].

        Like `TargetOutput.logits` in float32, or with kernels in the model's own dtype.
        """
        ...
