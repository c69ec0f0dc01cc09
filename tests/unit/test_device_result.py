"""A step's result comes out of one tensor as it went in."""

from __future__ import annotations

from dataclasses import fields
from itertools import accumulate

import pytest
import torch

from emberline.batch import Verdict
from emberline.engine.device_result import ResultPlaces, ScoreParts, places_of
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
    scores = parts.scores
    assert (scores is not None) == (num_top is not None)
    for name in (field.name for field in fields(ScoreParts)) if scores is not None else ():
        part = getattr(scores, name)
        part.copy_(torch.rand(part.shape) if part.is_floating_point() else some(*part.shape))
    gather_result(verdict, drafted, admitted, sure, numbers, parts.confidence)

    size = len(numbers)
    result = places_of(num_reqs, num_drafts, num_top, size).read(numbers.cpu().numpy())
    came = int(bounds[-1])
    wanted = {
        "emitted_start_loc": bounds,
        "num_accepted": stood,
        "num_drafted": drafted,
        "num_admitted": admitted,
        "token_ids": verdict.token_ids[:came],
    }
    for name, value in wanted.items():
        assert torch.equal(torch.from_numpy(getattr(result, name)), value.cpu()), name
    assert (result.scores is None) == (scores is None)
    for name in (field.name for field in fields(ScoreParts)) if scores is not None else ():
        read = torch.from_numpy(getattr(result.scores, name))
        assert torch.equal(read, getattr(scores, name)[:came].cpu()), name
    if sure is None or not num_drafts:
        assert result.confidence is None
    else:
        assert torch.equal(torch.from_numpy(result.confidence), sure.cpu())
