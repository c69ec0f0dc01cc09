"""A draft's own keys and values, gathered so that tokens being drafted can stand beside them.

Owns the columns' order and their number, which decide in what order attention sums. Must not know
layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.cache.kv_pool import KVPool

KEY_MULTIPLE = 128  # attention sums in the same order whatever the longest neighbour is


@dataclass(frozen=True, slots=True)
class ContextKV:
    """Keys and values of B requests: `lead` columns for what is being drafted, then the context.

    The leading columns come first so that what a longer neighbour adds is a masked tail. Whoever
    drafts fills them in, layer by layer; the pages are never written.
    """

    keys: Tensor  # [num_layers, B, S, kv_heads, head_dim]
    values: Tensor  # [num_layers, B, S, kv_heads, head_dim]
    in_context: Tensor  # [B, S] bool: columns that hold a committed token
    lead: int

    @classmethod
    def gather(cls, pool: KVPool, page_table: Tensor, lens: Tensor, lead: int) -> ContextKV:
        """The first `lens` [B] tokens of each row of `page_table` [B, M]."""
        # Elsewhere than on a CPU reading the maximum would wait for the device.
        on_host = lens.device.type == "cpu"
        longest = int(lens.max()) if on_host else page_table.shape[1] * pool.page_size
        total = -(-(lead + longest) // KEY_MULTIPLE) * KEY_MULTIPLE
        slots = F.pad(pool.slots_of(page_table, total - lead), (lead, 0)).flatten()
        shape = (pool.keys.shape[0], lens.shape[0], total, *pool.keys.shape[2:])
        keys = pool.keys.index_select(1, slots).view(shape)
        values = pool.values.index_select(1, slots).view(shape)
        column = torch.arange(total, device=lens.device)
        in_context = (column >= lead) & (column < lead + lens[:, None])
        return cls(keys, values, in_context, lead)

    def mask(self, num_drafted: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, S] of 0 or -inf: the context and the first `num_drafted` leading columns."""
        column = torch.arange(self.in_context.shape[1], device=self.in_context.device)
        hidden = ~((column < num_drafted) | self.in_context)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]
