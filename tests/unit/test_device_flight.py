"""What a flight says of a landed step."""

from __future__ import annotations

import pytest
import torch

from emberline.engine.device_flight import DeviceFlight, Group, Landing, Landings
from emberline.engine.device_result import ResultPlaces
from emberline.engine.device_step import Bucket
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.types import Request, SamplingParams, TokenLogprobs
from emberline.verify.planner import VerifyAll

TOP = 5


def scheduled(width: int | None) -> ScheduledRequest:
    params = SamplingParams(logprobs=width)
    state = RequestState(Request("r", (1,), params), None, 0, 9, frozenset(), [1])
    return ScheduledRequest(state, 1, 1, 1, samples=True, decodes=True)


@pytest.mark.parametrize(
    "widths", [[3, 3], [0, 0], [TOP, TOP], [2, None], [None, 1], [None, None], [1, 4], [TOP]]
)
def test_records_are_as_wide_as_was_asked(widths: list[int | None]) -> None:
    bucket = Bucket(num_reqs=3, num_tokens=6, num_pages=1, num_drafts=1, num_top=TOP)
    places = ResultPlaces(3, 1, TOP, has_confidence=False)
    numbers, parts = places.allocate(torch.device("cpu"))
    bounds = [0, 2, 3] if len(widths) > 1 else [0, 2]
    parts.emitted_start_loc.copy_(torch.tensor([*bounds, *[bounds[-1]] * (4 - len(bounds))]))
    for part in (parts.num_accepted, parts.num_drafted, parts.num_admitted):
        part.zero_()
    scores = parts.scores
    assert scores is not None
    tables = scores.ranks, scores.top_ids, scores.logprobs, scores.top_logprobs
    for part in (parts.token_ids, *tables):
        part.copy_(torch.arange(part.numel()).view(part.shape))
    plan = [scheduled(width) for width in widths]
    group = Group(bucket, range(len(plan)), Landing.on(numbers), None)
    flight = DeviceFlight(plan, [group], None, [], VerifyAll(), Landings(is_cuda=False))
    records = flight.read().record_runs()
    wanted: list[tuple[TokenLogprobs, ...] | None] = []
    for width, begin, end in zip(widths, bounds, bounds[1:], strict=False):
        run = [
            TokenLogprobs(i, float(i), i, *(tuple(range(TOP * i, TOP * i + width)),) * 2)
            for i in range(begin, end)
            if width is not None
        ]
        wanted.append(None if width is None else tuple(run))
    assert records == wanted
    for record in (r for run in records or () for r in run or ()):
        assert type(record) is TokenLogprobs
        assert all(type(value) is float for value in (record.logprob, *record.top_logprobs))
