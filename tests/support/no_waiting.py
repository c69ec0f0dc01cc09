"""Code that a graph is to capture, run where whatever would wait for a device fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {
    "aten::_local_scalar_dense",  # item, bool, int, float
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
}
INDEXING = {"aten::index.Tensor", "aten::index_put_", "aten::index_put"}


class _Captured(TorchDispatchMode):
    """Refuses what reads a value on the host, or makes a shape of one."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name()
        masked = name in INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITING or masked:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def _refuse(*_args: object, **_options: object) -> None:
    raise AssertionError("a list of values waits for the device")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail where the host would wait for its device."""
    with pytest.MonkeyPatch.context() as patch, _Captured():
        patch.setattr(torch.Tensor, "tolist", _refuse)  # a CPU tensor's needs no op
        yield
