"""What a launch is cut for: facts of the GPU. Where there is none, those of an H200."""

from __future__ import annotations

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a multiprocessor's programs have together."""
    if device.type != "cuda":
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
