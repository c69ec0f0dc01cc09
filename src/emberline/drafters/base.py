"""The drafter protocol. Two methods, three facts, no lifecycle.

State lives in pages, in the token list, or in a tensor row at `req_index`; a drafter samples only
through `sampling.keys.draw`, which hands back the ids and the logits they were drawn from.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, KVSpec
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
