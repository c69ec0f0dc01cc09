"""A step's result comes out of one tensor as it went in."""

from __future__ import annotations

from dataclasses import fields
from itertools import accumulate

import pytest
import torch

from emberline.batch import Verdict
from emberline.engine.device_result import ResultPlaces
from emberline.ops.triton.gather_result import LANES, gather_result

from support.triton_kernels import DEVICE


def some(*size: int) -> torch.Tensor:
    return torch.randint(1 << 40, size, device=DEVICE)


@pytest.mark.parametrize("has_confidence", [True, False])
@pytest.mark.parametrize("num_top", [None, 0, 1, 5])
@pytest.mark.parametrize(("num_reqs", "num_drafts"), [(1, 0), (1, 1), (3, 2), (LANES, 1)])
def test_what_was_written_is_read(
    num_reqs: int, num_drafts: int, num_top: int | None, has_confidence: bool
) -> None:
    places = ResultPlaces(num_reqs, num_drafts, num_top, has_confidence)
    numbers, parts = places.allocate(torch.device(DEVICE))
    stood = torch.arange(num_reqs, device=DEVICE) % (num_drafts + 1)
    bounds = torch.tensor([0, *accumulate((stood + 1).tolist())], device=DEVICE)
    verdict = Verdict(stood, some(places.num_tokens), some(places.num_tokens), bounds)
    drafted, admitted = some(num_reqs), some(num_reqs)
    sure = torch.rand(num_reqs, num_drafts, device=DEVICE) if has_confidence else None
    for part in (parts.ranks, parts.top_ids):
        part.copy_(some(*part.shape))
    for part in (parts.logprobs, parts.top_logprobs):
        part.copy_(torch.rand(part.shape))
    gather_result(verdict, drafted, admitted, sure, numbers, parts.confidence)

    numbers = numbers.cpu()
    result = ResultPlaces.of(num_reqs, num_drafts, num_top, numbers).read(numbers)
    came = int(bounds[-1])
    scored = 0 if num_top is None else came
    wanted = {
        "emitted_start_loc": bounds,
        "num_accepted": stood,
        "num_drafted": drafted,
        "num_admitted": admitted,
        "token_ids": verdict.token_ids[:came],
        "ranks": parts.ranks[:scored],
        "top_ids": parts.top_ids[:scored],
        "logprobs": parts.logprobs[:scored],
        "top_logprobs": parts.top_logprobs[:scored],
    }
    for name, value in wanted.items():
        assert torch.equal(torch.from_numpy(getattr(result, name)), value.cpu()), name
    if sure is None or not num_drafts:
        assert result.confidence is None
    else:
        assert torch.equal(torch.from_numpy(result.confidence), sure.cpu())
    assert {*wanted, "confidence"} == {field.name for field in fields(result)}
