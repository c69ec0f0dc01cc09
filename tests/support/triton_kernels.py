"""Where kernels run: on a GPU, else under Triton's interpreter. Import before any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)


def _drop_nans() -> None:
    """Of a NaN and a number, a GPU's minimum and maximum are the number: the interpreter's too."""
    from triton.runtime.interpreter import InterpreterBuilder

    def minimum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmin)

    def maximum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmax)

    InterpreterBuilder.create_minnumf = minimum
    InterpreterBuilder.create_maxnumf = maximum


if DEVICE == "cpu":
    _drop_nans()


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter that are as good as a tensor core's.

    Its own multiply bfloat16 by its bits, and float32 by a library whose sums depend on where in a
    tile a row stands. These are taken in float64 and rounded once. A GPU is left alone.
    """
    from triton.runtime import interpreter

    def numbers(handle: Any) -> Any:
        if handle.dtype.scalar == triton.language.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        product = (numbers(a) @ numbers(b)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
