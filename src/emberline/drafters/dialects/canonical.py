"""One spelling for every draft checkpoint: DeepSpec's config fields and tensor names.

Owns what a dialect has to hand over, and the names that wrappers put round tensors. It must not
know any one dialect's config, nor what a field means for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from emberline.config import SlotRule
from emberline.models.int8 import expand
from emberline.models.weights import ModelError, Weights

PREFIXES = ("module.", "draft_model.", "model.", "language_model.model.dspark.", "logit_head.")
"""Wrappers' prefixes, stripped in this order."""

W1 = "markov_head.markov_w1.weight"
W2 = "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""What a draft may leave to its target."""

UNUSED = ("*rotary_emb.inv_freq", "mask_embedding", "verifier_norm.*", "verifier_lm_head.*")
"""Tensors that change no draft: buffers, and what only training reads."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft as its dialect spells it, under DeepSpec's names. Tensors are not read yet."""

    source: str  # what messages call it, a path as a rule
    dialect: str  # for people
    config: Mapping[str, Any]  # DeepSpec's fields; layer ids are 0-based outputs, -1 = embeddings
    shapes: Mapping[str, tuple[int, ...]]  # of its tensors, by DeepSpec's names
    load: Callable[[], Weights]  # reads them; every call gives a fresh set, none taken
    slot_rule: SlotRule | None = None  # None: not a block draft
    slot_reason: str = ""  # why, for people
    ambiguous: bool = False  # the rule was guessed: files of this kind follow either
    layers_guessed: bool = False  # the layer ids may be one too high: files of this kind differ

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors that no drafter reads."""
        return unused(self.shapes)


def unused(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names that `UNUSED` covers, sorted."""
    return tuple(sorted(n for n in names if any(fnmatchcase(n, glob) for glob in UNUSED)))


def strip_prefixes(weights: Weights) -> dict[str, Tensor]:
    """A checkpoint's tensors without wrappers' prefixes.

    Raises:
        ModelError: two tensors have the same name once their prefixes are gone.
    """
    tensors: dict[str, Tensor] = {}
    for name in weights.names():
        short = name
        for prefix in PREFIXES:
            short = short.removeprefix(prefix)
        if short in tensors:
            raise ModelError(f"{weights.source}: two tensors are called {short!r}")
        tensors[short] = weights.take(name)
    return tensors


def head_fields(shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> dict[str, Any]:
    """DeepSpec's fields of the heads that are there: tensors beat what a config says of them."""
    fields: dict[str, Any] = {}
    if W1 in shapes:
        gated, rnn = (f"markov_head.{part}_proj.weight" in shapes for part in ("gate", "joint"))
        kind = "gated" if gated else "rnn" if rnn else "vanilla"
        fields |= {"markov_rank": shapes[W1][1], "markov_head_type": kind}
    if CONFIDENCE in shapes:
        wide = shapes[CONFIDENCE][-1] > hidden_size
        fields |= {"enable_confidence_head": True, "confidence_head_with_markov": wide}
    return fields


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def from_tensors(tensors: Mapping[str, Tensor], source: str) -> Weights:
    """Weights of canonical tensors, int8 matrices as float32."""
    return Weights(expand(tensors, source), source)
