"""Every case of the sampling benchmark runs, as often as it has copies of its inputs."""

from __future__ import annotations

import pytest
import torch

from gpu import kernels, sampling_ops
from support.triton_kernels import DEVICE

SMALL = sampling_ops.Sizes((sampling_ops.Shape("tiny", 40, 16, 8, 2),), (2,))
OPS = (
    "draw_greedy", "draw_by_noise", "draw_by_mass",
    "accept_greedy", "accept_coupled", "accept_rejection",
    "score_tokens", "score_tokens_unasked", "score_tokens_one_each", "gather_result",
    "markov_walk_greedy", "markov_walk_coupled", "markov_walk_with_q",
    "sound_lens", "allocate", "lay_out", "fill_batch",
)  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_a_case_runs_on_every_copy(op: str) -> None:
    named = {case.op: case for case in sampling_ops.cases(torch.float32, op, SMALL, DEVICE)}
    case = named[op]
    case.run(0)
    case.run(case.copies - 1)
    if case.plain is not None:
        case.plain(0)
    assert (case.num_bytes > 0) == (op != "score_tokens_unasked")


def test_the_suite_is_in_the_program_and_here() -> None:
    assert kernels.SUITES["sampling"] is sampling_ops.cases
    assert {case.op for case in sampling_ops.cases(torch.float32, "", SMALL, DEVICE)} == set(OPS)
