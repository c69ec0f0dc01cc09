"""Attention calls of transformers models: what each means, and what all of a model's need.

Owns the reading of the attention interface: every argument of a call is honoured, known to change
nothing, or refused by its name. A survey runs a model once on a few tokens and notes the calls, so
that shapes, windows and shared keys are what the model does, not what its config seems to say.
Must not know pages or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from emberline.batch import KVSpec
from emberline.models.weights import ModelError

STEP = "emberline"
"""Name of the attention function, and of the keyword that brings the step to it through a model."""
SURVEY = "emberline_survey"
SURVEY_TOKENS = 8

# What models hand on to attention without changing its result.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position"})


class AttentionCalls(Protocol):
    """Receives every attention call of a forward pass, and what comes out of tapped layers."""

    @property
    def tapped(self) -> dict[int, Tensor]:
        """Outputs [1, R, D] by tap, to be filled (`stock_parts.watch`)."""
        ...

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, call: Call
    ) -> Tensor:
        """Attention output [1, R, num_heads, value_dim].

        Args:
            module: the layer's attention module.
            query: [1, num_heads, R, head_dim], rotated.
            key: [1, num_kv_heads, R, head_dim], rotated.
            value: [1, num_kv_heads, R, value_dim].
            mask: what the model made of the mask; None in a step.
            call: the other arguments.
        """
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """What an attention call asks for besides its tensors."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None  # [num_heads]

    @classmethod
    def read(cls, module: Any, head_dim: int, options: Mapping[str, Any]) -> Call:
        """Read the keyword arguments of a call.

        Raises:
            ModelError: one of them is not understood.
        """
        left = {
            name: value
            for name, value in options.items()
            if value is not None and name not in _HARMLESS
        }
        if left.pop("dropout", 0.0) != 0.0:
            raise ModelError("attention uses dropout outside of training")
        causal = getattr(module, "is_causal", True) and left.pop("is_causal", True)
        if not causal:
            raise ModelError("attention is not causal (is_causal=False)")
        scale = left.pop("scaling", head_dim**-0.5)
        window, soft_cap = left.pop("sliding_window", None), left.pop("softcap", None)
        sinks = left.pop("s_aux", None)
        unknown = sorted(name for name, value in left.items() if value is not False)
        if unknown:
            raise ModelError(f"attention argument {unknown[0]!r} is not understood")
        return cls(float(scale), window, soft_cap, sinks)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer's shapes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None  # tokens a query sees, itself included; None: all
    source: int  # layer whose keys and values it reads: its own, or an earlier one's

    @property
    def share(self) -> int:
        """Query heads that read one key head."""
        return self.num_heads // self.num_kv_heads

    def kv_spec(self, num_layers: int) -> KVSpec:
        """KV of `num_layers` layers of this shape."""
        return KVSpec(num_layers, self.num_kv_heads, self.head_dim, value_dim=self.value_dim)


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Run `model` by transformers' own attention for a while: the reference."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(STEP)


def survey(model: Any, context_len: int) -> tuple[AttentionLayer, ...]:
    """Run `model` on a few tokens and return what its attention layers are, by layer.

    Args:
        model: a transformers causal language model that was made with attention `STEP`.
        context_len: tokens that a sequence may have: masks are compared as far as that.

    Raises:
        ModelError: the model keeps context elsewhere than in attention, does not use the attention
            interface, or asks it for something that is not understood.
    """
    notes = _Survey(context_len)
    ids = torch.arange(SURVEY_TOKENS, device=model.device)[None] % model.config.vocab_size
    # An index, not a count: with a count Gemma 4 leaves tokens out of its last layers.
    last = torch.tensor([SURVEY_TOKENS - 1], device=model.device)
    model.set_attn_implementation(SURVEY)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, logits_to_keep=last, **{STEP: notes})
    except ModelError:
        raise
    except Exception as error:  # modelling code may raise anything for a mask that it unpacks
        raise ModelError(
            f"{type(model).__name__} cannot be run through the attention interface ({error!r})"
        ) from error
    finally:
        model.set_attn_implementation(STEP)
    return _whole(model, notes.layers)


def _whole(model: Any, found: Mapping[int, AttentionLayer]) -> tuple[AttentionLayer, ...]:
    """The layers in order; every layer of the model must be among them."""
    depth = model.config.num_hidden_layers
    missing = [index for index in range(depth) if index not in found]
    if missing:
        kinds = getattr(model.config, "layer_types", None) or ["of another kind"] * depth
        raise ModelError(
            f"layer {missing[0]} of {type(model).__name__} ({kinds[missing[0]]}) makes no use of "
            "the attention interface: its context cannot be kept in pages"
        )
    if extra := sorted(set(found) - set(range(depth))):
        raise ModelError(f"{type(model).__name__} has attention in layer {extra[0]} of {depth}")
    return tuple(found[index] for index in range(depth))


class _Survey:
    """Notes the calls of one forward pass."""

    def __init__(self, context_len: int) -> None:
        self.layers: dict[int, AttentionLayer] = {}
        self.tapped: dict[int, Tensor] = {}
        self._context_len = context_len
        self._windows: dict[int, int | None] = {}  # by id of a mask that is kept
        self._kept: list[tuple[int, Tensor, Tensor]] = []  # layer, its keys, its values
        self._masks: list[Any] = []

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, call: Call
    ) -> Tensor:
        """Note the call; an output of the right shape."""
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise ModelError(f"{type(module).__name__} does not say which layer it belongs to")
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_heads % num_kv_heads or key.shape[2] != SURVEY_TOKENS:
            raise ModelError(
                f"layer {index}: queries {list(query.shape)} do not fit keys {list(key.shape)}"
            )
        window = self._window(index, mask)
        named = call.window if call.window is None or call.window < self._context_len else None
        if named not in (None, window):
            raise ModelError(
                f"layer {index}: the sliding window is {named} in the call and {window} in the mask"
            )
        source = next((at for at, k, v in self._kept if k is key and v is value), index)
        self._kept.append((index, key, value))
        self.layers[index] = AttentionLayer(
            num_heads, num_kv_heads, key.shape[3], value.shape[3], window, source
        )
        out = value.repeat_interleave(num_heads // num_kv_heads, 1).transpose(1, 2)
        return out.contiguous()  # as the output of any step: some models view it

    def _window(self, index: int, mask: Any) -> int | None:
        if not isinstance(mask, _Mask):
            raise ModelError(f"layer {index}: the model makes its attention mask by itself")
        if id(mask) not in self._windows:
            self._masks.append(mask)
            self._windows[id(mask)] = window_of_mask(mask.sees, self._context_len)
        return self._windows[id(mask)]


@dataclass(frozen=True, slots=True, eq=False)
class _Mask:
    """Stands for a mask during a survey: the rule that it would be filled by."""

    sees: Callable[..., Any]  # (batch, head, query position, key position) -> bool


def window_of_mask(sees: Callable[..., Any], context_len: int) -> int | None:
    """The window w of a rule that lets query i see keys (i - w, i]; None if it sees all before it.

    Args:
        sees: rule over index tensors (batch, head, query, key), elementwise.
        context_len: positions 0 .. context_len - 1 are looked at.

    Raises:
        ModelError: the rule is another one (chunks, both directions).
    """
    keys = torch.arange(context_len)
    zero = torch.tensor(0)

    def row(query: int) -> Tensor:
        seen: Tensor = sees(zero, zero, torch.tensor(query), keys)
        return seen.expand(context_len)

    window = int(row(context_len - 1).sum())
    probes = {0, 1, window - 1, window, window + 1, context_len // 2, context_len - 1}
    for query in sorted(p for p in probes if 0 <= p < context_len):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(row(query), expected):
            raise ModelError(
                "its attention mask is neither causal nor a sliding window (chunked attention, or "
                "one in both directions, is not supported)"
            )
    return None if window >= context_len else window


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function behind both names: hands the call to the step that came with it."""
    calls: AttentionCalls | None = options.pop(STEP, None)
    if calls is None:
        raise ModelError(f"{type(module).__name__} is not handed the keywords of the model's call")
    call = Call.read(module, query.shape[-1], options)
    return calls.attend(module, query, key, value, attention_mask, call), None


def _survey_mask(*, mask_function: Callable[..., Any], **_: Any) -> Any:
    return _Mask(mask_function)


# `STEP` gets no mask function on purpose: transformers then makes no mask at all.
AttentionInterface.register(STEP, _attention)
AttentionInterface.register(SURVEY, _attention)
AttentionMaskInterface.register(SURVEY, _survey_mask)
