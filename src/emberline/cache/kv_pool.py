"""KV tensors by slot. One pool for each layer shape of target and draft; page ids are shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from emberline.batch import KVSpec


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of every slot. Slot = page * page_size + offset; page 0 is scratch."""

    keys: Tensor  # [num_layers, num_slots, num_kv_heads, head_dim]
    values: Tensor  # [num_layers, num_slots, num_kv_heads, value_dim]
    page_size: int

    @classmethod
    def allocate(
        cls, spec: KVSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str
    ) -> KVPool:
        """Zeroed pool of `num_pages` pages. On a CPU the memory is only touched as it fills."""
        shape = (spec.num_layers, num_pages * page_size, spec.num_kv_heads)
        widths = (spec.head_dim, spec.value_dim or spec.head_dim)
        keys, values = (_zeros((*shape, width), dtype, device) for width in widths)
        return cls(keys, values, page_size)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys [N, num_kv_heads, head_dim] and values, of value_dim, at `slots` [N]."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages. A masked slot is multiplied by zero, not skipped: it must stay finite."""
        ids = torch.tensor(list(pages), dtype=torch.int64, device=self.keys.device)
        slots = self.slots_of(ids[None], len(ids) * self.page_size).flatten()
        self.keys[:, slots] = 0
        self.values[:, slots] = 0

    def slots_of(self, page_table: Tensor, window: int) -> Tensor:
        """[B, M] pages to [B, window] slots of positions 0 .. window-1 (page 0 past the end)."""
        pages = -(-window // self.page_size)
        table = page_table[:, :pages]
        if table.shape[1] < pages:
            table = torch.nn.functional.pad(table, (0, pages - table.shape[1]))
        offsets = torch.arange(self.page_size, device=page_table.device)
        return (table[:, :, None] * self.page_size + offsets).flatten(1)[:, :window]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from calloc: pages of memory appear on first write, torch.zeros fills now.
    width = torch.empty(0, dtype=dtype).element_size()
    raw = np.zeros(int(np.prod(shape)) * width, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
