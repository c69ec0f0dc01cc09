"""What an MLP's gate goes through, by the name that a config has for it. Must not know weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from emberline.models.weights import ModelError

_USUAL: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that transformers knows by that name, elementwise.

    Raises:
        ModelError: it knows none.
    """
    if name in _USUAL:
        return _USUAL[name]
    # Half the library comes along: only those who need one of its own pay for that.
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise ModelError(f"hidden_act {name!r} is unknown")
    found: Callable[[Tensor], Tensor] = ACT2FN[name]
    return found
