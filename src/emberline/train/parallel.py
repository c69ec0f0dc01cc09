"""Several processes that train one draft: which rows are whose, and how sums meet.

Every process holds all rows and draws the same plan of a step; it does its own share of the plan's
rows, and gradients are averaged by PyTorch's DistributedDataParallel. Weights are not sharded: a
draft with its optimisers is a few gigabytes at most, so that FSDP would trade memory that is not
short for communication at every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, slots=True)
class World:
    """This process among all."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def shares(self, rows: int, parts: int) -> list[slice]:
        """This process's rows of a step, in equal parts.

        Raises:
            ValueError: the rows do not divide evenly.
        """
        pieces = self.size * parts
        if rows % pieces:
            raise ValueError(
                f"train.seqs_per_step {rows} must be a multiple of {pieces}: "
                f"processes {self.size} x accumulate {parts}"
            )
        width = rows // pieces
        first = self.rank * parts
        return [slice(i * width, (i + 1) * width) for i in range(first, first + parts)]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes; every process must call it."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def least(self, tensor: Tensor) -> Tensor:
        """The smallest over all processes; every process must call it."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over the processes."""
        if self.size == 1:
            return module
        return DistributedDataParallel(module, broadcast_buffers=False)

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()


def unsynchronised(module: nn.Module) -> AbstractContextManager[None]:
    """Gradients stay local until a backward pass outside of this block."""
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return nullcontext()


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[World, torch.device]]:
    """The world that `torchrun` started this process in, and this process's device of that type.

    Without torchrun: a world of one.
    """
    if not dist.is_torchelastic_launched():
        yield World(), device
        return
    cuda = device.type == "cuda"
    if cuda:
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        world = World(dist.get_rank(), dist.get_world_size())
        yield world, device
        world.wait()
    finally:
        dist.destroy_process_group()
