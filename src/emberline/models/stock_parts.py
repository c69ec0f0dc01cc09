"""Parts of a transformers model that drafts share or read: its body, its head, its layers' outputs.

Owns where they are found, by structure rather than by name. Must not know pages or steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emberline.models.stock_attention import STEP, plain_attention
from emberline.models.weights import ModelError


def find_blocks(model: Any, depth: int) -> nn.ModuleList:
    """The list of decoder layers: each holds the attention of its own number.

    Raises:
        ModelError: there is none of `depth` layers.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            held = [{getattr(m, "layer_idx", None) for m in layer.modules()} for layer in module]
            if all(index in found for index, found in enumerate(held)):
                return module
    raise ModelError(f"{type(model).__name__} has no list of its {depth} layers to tap")


def find_body(model: Any, blocks: nn.ModuleList) -> nn.Module:
    """The module around the layers: from token ids to the last hidden state, normed."""
    body: nn.Module = model.get_submodule(".".join(_path(model, blocks)))
    return body


def watch(blocks: nn.ModuleList, tap: int) -> None:
    """Have a layer's raw output noted in `AttentionCalls.tapped` of whatever step runs it.

    `tap` is 0-based; -1 is the input of the first layer.

    Raises:
        ModelError: there is no such layer.
    """
    if not -1 <= tap < len(blocks):
        raise ModelError(f"tap {tap} is not a layer: -1 .. {len(blocks) - 1}")

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _note(kwargs, tap, args[0] if args else kwargs["hidden_states"])

    def after(_: Any, __: Any, kwargs: dict[str, Any], output: Any) -> None:
        _note(kwargs, tap, output if isinstance(output, Tensor) else output[0])

    if tap < 0:
        blocks[0].register_forward_pre_hook(before, with_kwargs=True)
    else:
        blocks[tap].register_forward_hook(after, with_kwargs=True)


def headed(model: Any, blocks: nn.ModuleList) -> Any:
    """The model with its body taken out: what is left turns normed states into logits.

    Call it with `inputs_embeds` [1, N, D], the normed states.
    """
    given = _Given(_output_type(model, find_body(model, blocks)))
    return _replaced(model, _path(model, blocks), given)


def _path(model: Any, blocks: nn.ModuleList) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    name: str = names[id(blocks)]
    return name.split(".")[:-1]


def _note(kwargs: Mapping[str, Any], tap: int, hidden: Tensor) -> None:
    step = kwargs.get(STEP)
    if step is not None:
        step.tapped[tap] = hidden


class _Given(nn.Module):
    """Stands in for a model's body: its output is the hidden states that came in."""

    def __init__(self, output_type: Any) -> None:
        super().__init__()
        self._output_type = output_type

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """[1, N, D] as the last hidden state."""
        return self._output_type(last_hidden_state=inputs_embeds)


def _replaced(module: nn.Module, path: Sequence[str], leaf: nn.Module) -> nn.Module:
    """A shallow copy of `module` with another submodule at `path`; the rest is shared."""
    if not path:
        return leaf
    twin = copy.copy(module)
    child = _replaced(module.get_submodule(path[0]), path[1:], leaf)
    twin.__dict__["_modules"] = {**module._modules, path[0]: child}
    return twin


def _output_type(model: Any, body: nn.Module) -> Any:
    """The class of a body's output, by running the model on one token."""
    seen: list[Any] = []
    hook = body.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.no_grad(), plain_attention(model):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    hook.remove()
    return type(seen[0])
