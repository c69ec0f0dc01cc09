"""Every fast operation against its plain reference."""

from __future__ import annotations

import pytest
import torch

from emberline.ops.attention import MOST_WASTE, QueryGroup, attend, plan_attention, window_of
from emberline.ops.linear import Linear, _granted
from emberline.ops.norm import rms_norm
from emberline.ops.rotary import apply_rotary, rotate, sign_sin

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_is_apply_rotary_bit_for_bit(dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 16).to(dtype)
    cos, sin = torch.randn(2, 5, 16).to(dtype)
    before = sin.clone()
    assert torch.equal(rotate(x, cos, sign_sin(sin)), apply_rotary(x, cos, sin))
    assert torch.equal(sin, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear(dtype, bias) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(11, 24).to(dtype), torch.randn(40, 24).to(dtype)
    offset = torch.randn(40).to(dtype) if bias else None
    got, want = Linear.pack(weight, offset)(x), Linear(weight, offset)(x)
    torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_packed_linear_keeps_nan_in_its_row() -> None:
    torch.manual_seed(0)
    linear = Linear.pack(torch.randn(16, 24))
    x = torch.randn(8, 24)
    want = linear(x)
    x[3] = float("nan")
    got = linear(x)
    assert got[3].isnan().all()
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(got[keep], want[keep])


def test_rms_norm_against_torch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 12), torch.rand(12)
    want = torch.nn.functional.rms_norm(x, (12,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("end", "window"),
    [(1, 128), (128, 128), (129, 384), (256, 384), (385, 512), (513, 640), (641, 896)],
)
def test_windows_cover_and_never_end_in_a_block_of_256(end, window) -> None:
    assert window_of(end) == window


@pytest.mark.parametrize("sliding_window", [None, 9, 300])
@pytest.mark.parametrize("share", [1, 3])
def test_attention_against_a_dense_reference(sliding_window, share) -> None:
    torch.manual_seed(0)
    query_lens, seq_lens = [1, 300, 8, 3, 1], [40, 700, 8, 131, 600]
    page_size, kv_heads, dim = 16, 2, 8
    table = torch.zeros(5, 44, dtype=torch.int64)
    pages = (torch.randperm(120) + 1).tolist()
    for row, n in zip(table, seq_lens, strict=True):
        used = -(-n // page_size)
        row[:used] = torch.tensor([pages.pop() for _ in range(used)])
    keys, values = torch.randn(2, 121 * page_size, kv_heads, dim)
    q = torch.randn(sum(query_lens), kv_heads * share, dim)
    plan = plan_attention(
        query_lens,
        seq_lens,
        table,
        page_size,
        share=share,
        sliding_window=sliding_window,
        dtype=torch.float32,
    )
    got = attend(q, keys, values, plan, 0.3).view(q.shape)
    token = 0
    for req, (count, end) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots = [int(table[req, p // 16]) * 16 + p % 16 for p in range(end)]
        k = keys[slots].repeat_interleave(share, 1)
        v = values[slots].repeat_interleave(share, 1)
        for position in range(end - count, end):
            low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            scores = torch.einsum("hd,khd->hk", q[token], k[low : position + 1]) * 0.3
            want = torch.einsum("hk,khd->hd", scores.softmax(-1), v[low : position + 1])
            torch.testing.assert_close(got[token], want, rtol=1e-5, atol=1e-5)
            token += 1


@pytest.mark.parametrize("seed", range(6))
def test_queries_of_unlike_lengths_are_padded_little_and_come_out_as_alone(seed: int) -> None:
    """Bit for bit, whoever they are grouped with."""
    generator = torch.Generator().manual_seed(seed)

    def any_of(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    share, kv_heads, dim, page_size = 3, 2, 8, 16
    query_lens = [any_of(1, 17 if any_of(0, 3) else 2) for _ in range(any_of(2, 20))]
    seq_lens = [count + any_of(0, 380) for count in query_lens]
    num_pages = 26
    table = torch.arange(1, len(query_lens) * num_pages + 1).view(-1, num_pages)
    keys, values = torch.randn(
        2, (table.numel() + 1) * page_size, kv_heads, dim, generator=generator
    )
    q = torch.randn(sum(query_lens), kv_heads * share, dim, generator=generator)

    def plan(lens: list[int], ends: list[int], pages: torch.Tensor) -> list[QueryGroup]:
        return plan_attention(
            lens, ends, pages, page_size, share=share, sliding_window=None, dtype=torch.float32
        )

    groups = plan(query_lens, seq_lens, table)
    tokens = torch.arange(len(q))
    assert sorted(int(i) for group in groups for i in tokens[group.tokens]) == tokens.tolist()
    for group in groups:
        live = sum(-(-query_lens[r] * share // 8) * 8 for r in _reqs(group, query_lens))
        assert group.num_reqs * group.mask.shape[2] - live <= MOST_WASTE
    together = attend(q, keys, values, groups, 0.3)
    token = 0
    for req, (count, end) in enumerate(zip(query_lens, seq_lens, strict=True)):
        own = q[token : token + count]
        alone = attend(own, keys, values, plan([count], [end], table[req : req + 1]), 0.3)
        assert torch.equal(together[token : token + count], alone)
        token += count


def _reqs(group: QueryGroup, query_lens: list[int]) -> list[int]:
    """Requests in a group of whole ones."""
    owners = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    return sorted(set(owners[group.tokens].tolist()))


@pytest.mark.parametrize("count", [1, 8, 9, 255, 257, 520, 1000])
def test_packed_rows_do_not_depend_on_how_many_run(count: int) -> None:
    """Odd counts run as the next of a few sizes; what is added is cut off again."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=generator) for n in (96, 1024))
    bias = torch.randn(96, generator=generator)
    linear = Linear.pack(weight.clone(), bias)
    y = linear(x[:count])
    assert y.shape == (count, 96)
    torch.testing.assert_close(y, torch.nn.functional.linear(x[:count], weight, bias))


def test_few_row_counts_run() -> None:
    sizes = {_granted(count) for count in range(1, 4097)}
    assert len(sizes) <= 104  # a megabyte each, and for every shape of weights
    assert all(_granted(size) == size for size in sizes)
    assert all(
        count <= _granted(count) <= max(count + 7, count * 17 / 16) for count in range(1, 4097)
    )
