"""From the packed rows of a projection to rotated queries, and keys and values in their slots."""

from __future__ import annotations

from torch import Tensor

from emberline.ops.norm import rms_norm
from emberline.ops.rotary import rotate


def place_qkv(
    qkv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor | None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Normalise and rotate queries and keys; write keys and values.

    Args:
        qkv: [N, (num_heads + 2 num_kv_heads) * head_dim]: heads of queries, keys, then values.
        cos, signed_sin: [N, head_dim], as `rotate` takes them.
        keys, values: [num_slots, num_kv_heads, head_dim], written to.
        slots: [N] integers, where each row's keys and values go; rows that are padding name slots
            of the scratch page. None: row n goes to slot n.
        norm: [h, head_dim], RMS norm weights of the first h heads: num_heads + num_kv_heads, or
            2 num_kv_heads more than num_heads where values are normalised as well.
        eps: of the norm.

    Returns:
        Queries [N, num_heads, head_dim].
    """
    kv_heads, dim = keys.shape[1:]
    heads = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
    num_heads = heads.shape[1] - 2 * kv_heads
    if norm is not None:
        heads = _normed(heads, norm, eps)
    turned = rotate(heads[:, : num_heads + kv_heads], cos, signed_sin)
    _write(keys, slots, turned[:, num_heads:])
    _write(values, slots, heads[:, num_heads + kv_heads :])
    return turned[:, :num_heads]


def place_context(
    kv: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    norm: Tensor,
    eps: float,
) -> None:
    """Write the keys and values of several layers that were projected together.

    Args:
        kv: [N, num_layers, 2 num_kv_heads, head_dim]: heads of keys, then of values.
        cos, signed_sin, slots, eps: as in `place_qkv`.
        keys, values: [num_layers, num_slots, num_kv_heads, head_dim], written to.
        norm: [num_layers, h, head_dim], weights of the first h heads: num_kv_heads, or twice as
            many where values are normalised as well.
    """
    for layer in range(kv.shape[1]):
        place_qkv(
            kv[:, layer].flatten(1),
            cos,
            signed_sin,
            keys[layer],
            values[layer],
            slots,
            norm=norm[layer],
            eps=eps,
        )


def _normed(heads: Tensor, norm: Tensor, eps: float) -> Tensor:
    """[N, H, head_dim], of which the first heads that `norm` has weights for are normalised."""
    result = heads.clone()
    result[:, : len(norm)] = rms_norm(heads[:, : len(norm)], norm, eps)
    return result


def _write(pool: Tensor, slots: Tensor | None, rows: Tensor) -> None:
    if slots is None:
        pool[: len(rows)] = rows
    else:
        pool.index_copy_(0, slots.long(), rows)
