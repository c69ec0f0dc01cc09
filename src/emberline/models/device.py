"""Which device a setting names, and what it computes in. Must not know models."""

from __future__ import annotations

import torch

from emberline.config import DtypeName


def resolve_device(name: str) -> str:
    """The torch device of that name: "cpu" or "cuda:N". "auto" is a GPU if PyTorch finds one.

    Raises:
        ValueError: there is no such device here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, index = name.partition(":")
    if name == "auto":
        kind, index = ("cuda", "") if count else ("cpu", "")
    if kind == "cpu" and name in ("auto", "cpu"):
        return "cpu"
    if kind != "cuda" or (":" in name and not (index.isascii() and index.isdigit())):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    number = int(index or 0)
    if number >= count:
        found = f"{count} GPUs" if count else "no GPU"
        raise ValueError(f"device {name}: PyTorch finds {found} here: give cpu or auto")
    return f"cuda:{number}"


def device_name(device: str) -> str:
    """What the device calls itself: a GPU's model, or "cpu"."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)


def resolve_dtype(name: DtypeName, device: str) -> torch.dtype:
    """The dtype of weights, KV and computation: bfloat16 where the hardware multiplies in it."""
    if name == "float32":
        return torch.float32
    if name == "bfloat16":
        return torch.bfloat16
    fast = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
