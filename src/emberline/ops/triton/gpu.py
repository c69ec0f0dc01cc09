"""What a launch is cut for: facts of the GPU, and kernels that start before their turn.

Where there is no GPU, the facts are those of an H200.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

EARLY_FROM = (9, 0)  # compute capability that has programmatic dependent launch


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


@cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that calls `await_inputs`.

    Such a kernel's programs start once all of the kernel before have their inputs and leave room:
    its launch, and what it reads of weights, cost no time of their own.
    """
    there = device.type == "cuda" and torch.cuda.is_available()
    if not there or torch.cuda.get_device_capability(device) < EARLY_FROM:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def await_inputs(EARLY: tl.constexpr, HOLDS: tl.constexpr = False):
    """Wait for the end of all kernels before this one, then let the next one start.

    Every program has to call this once, before it reads what a kernel wrote or writes what one may
    still read: the kernel after it relies on it. Weights may be read before. To let the next one
    start any sooner would let the ones after it start as well, and waiting they are in the way.
    HOLDS: the next one is held back until this one has ended.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if not HOLDS:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(pointers):
    """Ask for the cache lines at `pointers`, and go on."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
