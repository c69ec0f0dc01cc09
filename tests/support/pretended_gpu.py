"""A GPU that is only pretended: what is made on "cuda" lies on the CPU, but stays apart from it.

Tensors carry a mark of where they would lie. Whoever mixes the two in a way that a GPU refuses, or
reads one of a GPU's as an array, fails here as well; the numbers are the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)


def on_gpu(tensor: Tensor) -> bool:
    return getattr(tensor, "pretended", False)


def tensors_of(*values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def mark(result: Any, there: bool, taken: Sequence[Tensor] = ()) -> Any:
    """What an op returned, but for what it was given and returned as it is."""
    known = {id(tensor) for tensor in taken}
    for tensor in tensors_of(result):
        if id(tensor) not in known:
            tensor.pretended = there  # type: ignore[attr-defined]
    return result


def names_gpu(device: object) -> bool:
    return str(device).startswith("cuda")


class _Apart(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        options.pop("pin_memory", None)
        if func in (Tensor.numpy, Tensor.__array__):
            assert not on_gpu(args[0]), "an array of a GPU's memory"
        if func == Tensor.is_cuda.__get__:
            return on_gpu(args[0])
        if func == Tensor.device.__get__:
            return GPU if on_gpu(args[0]) else func(*args)
        if func is Tensor.pin_memory:
            return args[0]
        if func in (Tensor.to, Tensor.cpu):
            return _moved(func, args, options)
        there = _checked(func, args, options)
        if options.get("device") is not None:
            there = names_gpu(options["device"])
            options["device"] = "cpu"
        return mark(func(*args, **options), there, tensors_of(args, options))


def _moved(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    there = on_gpu(tensor) and func is not Tensor.cpu
    dtype = options.get("dtype", tensor.dtype)
    for value in (*rest, options.get("device")):
        if isinstance(value, Tensor):
            there, dtype = on_gpu(value), value.dtype
        elif isinstance(value, str | torch.device):
            there = names_gpu(value)
        elif isinstance(value, torch.dtype):
            dtype = value
    if there == on_gpu(tensor) and dtype == tensor.dtype:
        return tensor
    return mark(tensor.detach().clone().type(dtype), there)


def _checked(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a result lies on the GPU. Fails where its inputs must not meet."""
    taken = tensors_of(args, options)
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        there, places = on_gpu(args[0]), tensors_of(args[1])
        assert there or not any(map(on_gpu, places)), "a CPU's tensor at a GPU's places"
        apart = [t for t in tensors_of(args[2:]) if t.dim() and on_gpu(t) != there]
        assert not (places and apart), "numbers of another device at places"
        return there
    # Numbers of a CPU go anywhere, those of a GPU stay.
    sides = {on_gpu(tensor) for tensor in taken if tensor.dim() or on_gpu(tensor)}
    if func is Tensor.copy_:
        return on_gpu(args[0])
    assert len(sides) < 2, f"{func.__name__} of two devices"
    return True in sides


class _Event:
    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """While it lasts, "cuda:0" is a device."""
    with pytest.MonkeyPatch.context() as patch, _Apart():
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "current_stream", lambda: "the only stream")
        yield
