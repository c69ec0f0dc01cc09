"""The drafter protocol. Two methods, three facts, no lifecycle.

State lives in pages, in the token list, or in a tensor row at `req_index`; a drafter samples only
through `sampling.keys.draw`, which hands back the ids and the logits they were drawn from.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from emberline.batch import (
    BlockContext,
    CommittedTokens,
    DraftContext,
    DraftProposal,
    DrawnBlock,
    KVSpec,
)
from emberline.cache.kv_pool import KVPool


class Drafter(Protocol):
    """Proposes blocks of tokens and follows what the target commits."""

    @property
    def max_draft_tokens(self) -> int:
        """K, the most drafts a block holds."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers (0-based) whose raw output `observe` reads; -1 is the embedding output."""
        ...

    @property
    def kv_spec(self) -> KVSpec | None:
        """Draft layers that keep KV in the target's pages; None if there are none."""
        ...

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft up to K tokens after each request's anchor."""
        ...

    def observe(self, committed: CommittedTokens) -> None:
        """Take in tokens that the target has committed, in sequence order for each request."""
        ...


@runtime_checkable
class KeepsKV(Protocol):
    """A drafter with KV in tensors: what a broken request leaves there has to be cleared."""

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """Where the KV of `kv_spec` is kept."""
        ...


@runtime_checkable
class Capturable(Protocol):
    """A drafter that a graph can capture: with Triton's kernels nothing in it waits for the host.

    Both take buckets: what they make of requests and tokens that do not live is anything, and their
    keys and values go where `page_table` and `slot_mapping` say, which is page 0.
    """

    def propose_block(self, context: BlockContext) -> DrawnBlock:
        """`Drafter.propose`, of `context.num_drafts` drafts a request."""
        ...

    def follow(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """`Drafter.observe` of [T, A] taps of tokens at [T] positions, to be written at [T] slots.

        Tokens that turn out not to be committed may be among them, as long as their slots are
        written again before anything reads them.
        """
        ...
