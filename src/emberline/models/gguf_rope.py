"""Rotary position settings of a GGUF file as transformers' ``rope_parameters``.

Owns the recognition of position scaling: none, linear, YaRN, and the frequency factors of
Llama 3.1 and later, which a GGUF file holds as a tensor rather than as settings.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from emberline.models.gguf_file import GGUFFile
from emberline.models.weights import ModelError

__all__ = ["ROPE_FREQS", "rope_parameters"]

ROPE_FREQS = "rope_freqs.weight"
# Every published Llama of this kind was trained at 8192 with these two bounds.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
YARN_PLAIN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0}


def rope_parameters(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The ``rope_parameters`` entry of config.json.

    Raises:
        ModelError: a scaling that transformers has no equal of.
    """
    prefix = f"{file.metadata['general.architecture']}.rope.scaling."
    scaling = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    kind = scaling.get("type", "none")
    if ROPE_FREQS in file.tensors:
        if kind != "none":
            raise ModelError(f"position scaling {kind!r} together with {ROPE_FREQS}")
        return _llama3(file, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear" and "factor" in scaling:
        return {"rope_type": "linear", "rope_theta": theta, "factor": scaling["factor"]}
    if kind == "yarn":
        return _yarn(scaling, theta)
    raise ModelError(f"position scaling {scaling} is not supported (linear and yarn are)")


def _yarn(scaling: dict[str, Any], theta: float) -> dict[str, Any]:
    changed = [key for key, plain in YARN_PLAIN.items() if scaling.get(key, plain) != plain]
    if changed or scaling.get("yarn_log_multiplier"):
        raise ModelError(f"YaRN position scaling with {changed or 'yarn_log_multiplier'}")
    if "factor" not in scaling or "original_context_length" not in scaling:
        raise ModelError("YaRN position scaling without factor or original_context_length")
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling["factor"],
        "original_max_position_embeddings": scaling["original_context_length"],
        "beta_fast": scaling.get("yarn_beta_fast", 32.0),
        "beta_slow": scaling.get("yarn_beta_slow", 1.0),
    }


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Settings whose factors are those in the file; anything else there is refused."""
    found = file.tensors[ROPE_FREQS].load().to(torch.float64).flatten()
    factor = round(float(found.max()), 4)
    expected = _llama3_factors(theta, head_dim, factor)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4):
        raise ModelError(f"{ROPE_FREQS} holds factors that are not those of the Llama 3 rule")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _llama3_factors(theta: float, head_dim: int, factor: float) -> torch.Tensor:
    """What each rotary frequency is divided by, [head_dim / 2].

    Wavelengths longer than the trained context are stretched by ``factor``, those shorter than a
    quarter of it are kept, and the inverse is interpolated between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = LLAMA3_CONTEXT / (2 * math.pi * theta**exponents)  # in the trained context
    kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0)
    return 1.0 / ((1.0 - kept) / factor + kept)
