"""Every case of the kernel benchmark computes what its plain form does, at sizes that are quick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu import linear_ops, model_ops, timing
from support.triton_kernels import DEVICE

SMALL = model_ops.Sizes(
    (model_ops.Shape("tiny", 48, 96, 4, 2, 16, True),),
    rows=(3,),
    attention=((2, 3, 20),),
    blocks=((2, 3, 20),),
)


def test_cases_compute_the_same_as_their_plain_forms() -> None:
    torch.manual_seed(0)
    seen = set()
    for case in model_ops.cases(torch.float32, "", SMALL, DEVICE):
        seen.add(case.op)
        assert case.plain is not None
        last = case.copies - 1
        torch.testing.assert_close(case.run(last), case.plain(last), rtol=1e-4, atol=1e-5)
        assert case.num_bytes > 0
    assert len(seen) == 7


def test_linear_maps_compute_the_same_as_their_plain_forms() -> None:
    torch.manual_seed(0)
    seen = []
    sizes = linear_ops.Sizes(tuple((shape, 40) for shape in SMALL.shapes), few=(3,), fixed=(3,))
    for case in linear_ops.cases(torch.float32, "", sizes, DEVICE):
        seen.append(case.op)
        last = case.copies - 1
        torch.testing.assert_close(case.run(last), case.plain(last), rtol=1e-4, atol=1e-5)
        assert case.num_bytes > 0
    assert sorted(set(seen)) == [
        "linear",
        "linear_add",
        "linear_fixed",
        "norm_gated",
        "norm_linear",
    ]
    assert len(seen) == 5 + 4


def test_only_the_ops_that_were_asked_for() -> None:
    ops = {case.op for case in model_ops.cases(torch.float32, "attention", SMALL, DEVICE)}
    assert ops == {"paged_attention", "paged_attention_fixed", "block_attention"}


@pytest.mark.parametrize(("num_bytes", "copies"), [(1e9, 1), (60e6, 4), (1e3, 64), (0, 64)])
def test_copies_overflow_the_cache_as_far_as_they_may(num_bytes, copies) -> None:
    assert timing.copies_of(num_bytes) == copies


@pytest.mark.skipif(DEVICE == "cuda", reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    done = subprocess.run(
        [sys.executable, "-m", "gpu.kernels"],
        cwd=benchmarks,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "gpu.kernels needs a CUDA GPU: none is visible"
