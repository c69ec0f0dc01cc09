"""Faults that servers have had, each switched on in a real server over a tiny target.

Every fault wraps a real piece: what it gets is right, what it hands on is wrong in one way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from emberline.batch import DraftContext, DraftProposal
from emberline.engine import outcome as outcome_module
from emberline.engine.engine import Engine
from emberline.engine.plan import ScheduledRequest
from emberline.engine.scoring import score_emitted
from emberline.engine.step import StepResult
from emberline.layout import Scored
from emberline.server import completions
from emberline.types import FinishReason, RequestOutput

from support.engines import make_engine
from support.paged import PrefixDrafter
from support.serving import NAME, SayingTarget, Server, make_tokenizer, serve

Plan = Sequence[ScheduledRequest]


class RememberingDrafter(PrefixDrafter):
    """Keeps what it proposed last."""

    last: DraftProposal | None = None

    def propose(self, context: DraftContext) -> DraftProposal:
        self.last = super().propose(context)
        return self.last


@dataclass
class Sabotage:
    """A running server and the fault that is switched on, if any."""

    server: Server
    drafter: RememberingDrafter
    fault: str | None = None

    @contextlib.contextmanager
    def on(self, fault: str) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None


@contextlib.contextmanager
def sabotaged_server(monkeypatch: pytest.MonkeyPatch, noise: float = 0.8) -> Iterator[Sabotage]:
    """A server with drafts that are often wrong, and every fault waiting to be switched on."""
    tokenizer = make_tokenizer()
    target = SayingTarget(tokenizer, 256)
    drafter = RememberingDrafter(target, 5, noise=noise)
    engine = make_engine(target, drafter, num_pages=1024, eos_ids=(target.eos,))
    engine.info["model"] = NAME
    torch.set_num_threads(1)
    with serve(engine, tokenizer, target) as server:
        state = Sabotage(server, drafter)
        _wrap_scoring(monkeypatch, state)
        _wrap_steps(monkeypatch, engine, state)
        _wrap_stream(monkeypatch, state)
        yield state


def _wrap_scoring(monkeypatch: pytest.MonkeyPatch, state: Sabotage) -> None:
    def scored(plan: Plan, result: StepResult) -> Any:
        wrong = SCORING.get(state.fault or "")
        return score_emitted(plan, wrong(plan, result, state) if wrong else result)

    monkeypatch.setattr(outcome_module, "score_emitted", scored)


def _wrap_steps(monkeypatch: pytest.MonkeyPatch, engine: Engine, state: Sabotage) -> None:
    real = engine.step

    def step() -> list[RequestOutput]:
        outputs = real()
        return [past_stop(one) for one in outputs] if state.fault == "past stop" else outputs

    monkeypatch.setattr(engine, "step", step)


def _wrap_stream(monkeypatch: pytest.MonkeyPatch, state: Sabotage) -> None:
    real = completions._CompletionFormat.deltas

    def deltas(self: Any, output: RequestOutput) -> Any:
        return real(self, repeated(output) if state.fault == "repeated alternatives" else output)

    monkeypatch.setattr(completions._CompletionFormat, "deltas", deltas)


def past_stop(output: RequestOutput) -> RequestOutput:
    """The record of one more token of the block that a stop has cut."""
    if output.finish_reason is not FinishReason.STOP or not output.logprobs:
        return output
    return replace(
        output,
        token_ids=(*output.token_ids, output.token_ids[-1]),
        logprobs=(*output.logprobs, output.logprobs[-1]),
    )


def repeated(output: RequestOutput) -> RequestOutput:
    """An event whose entries all have the alternatives of the first."""
    if not output.logprobs:
        return output
    first = output.logprobs[0]
    same = {"top_ids": first.top_ids, "top_logprobs": first.top_logprobs}
    return replace(output, logprobs=tuple(one._replace(**same) for one in output.logprobs))


def windows(result: StepResult) -> list[tuple[int, int]]:
    """Where each request's window is among the scored rows."""
    ends = result.layout.scored_start_loc[1:].tolist()
    lens = result.layout.window_lens.tolist()
    return [(end - length, end) for end, length in zip(ends, lens, strict=True)]


def _moved(result: StepResult, index: Tensor) -> StepResult:
    return replace(result, verdict=replace(result.verdict, scored_index=index))


def shifted(_: Plan, result: StepResult, __: Sabotage, by: int = 1) -> StepResult:
    """Every emitted token scored by the entry after its own."""
    index = result.verdict.scored_index.clone()
    bounds = result.verdict.emitted_start_loc.tolist()
    for i, (start, end) in enumerate(windows(result)):
        run = slice(bounds[i], bounds[i + 1])
        if end > start:
            index[run] = (index[run] + by).clamp(start, end - 1)
    return _moved(result, index)


def neighbours(_: Plan, result: StepResult, __: Sabotage) -> StepResult:
    """A request's tokens scored by the window of the next request in the batch."""
    spans = [span for span in windows(result) if span[1] > span[0]]
    index = result.verdict.scored_index.clone()
    for n, row in enumerate(result.verdict.scored_index.tolist()):
        own = next(i for i, (start, end) in enumerate(spans) if start <= row < end)
        start, end = spans[(own + 1) % len(spans)]
        index[n] = min(start + row - spans[own][0], end - 1)
    return _moved(result, index)


def zero_rows(_: Plan, result: StepResult, __: Sabotage) -> StepResult:
    """Rows behind the first of a window were never written."""
    raw = result.raw_logits.clone()
    for start, end in windows(result):
        raw[start + 1 : end] = 0.0
    return replace(result, raw_logits=Scored(raw))


def drafts(_: Plan, result: StepResult, state: Sabotage) -> StepResult:
    """Accepted tokens scored by what the draft was drawn from."""
    raw = result.raw_logits.clone()
    for i, (start, _end) in enumerate(windows(result)):
        accepted = int(result.verdict.num_accepted[i])
        if accepted and state.drafter.last is not None and state.drafter.last.logits is not None:
            raw[start : start + accepted] = state.drafter.last.logits[0, :accepted]
    return replace(result, raw_logits=Scored(raw))


def residuals(_: Plan, result: StepResult, state: Sabotage) -> StepResult:
    """Recovered tokens scored by max(p - q, 0), which they were drawn from."""
    raw = result.raw_logits.clone()
    for i, (start, _end) in enumerate(windows(result)):
        accepted, admitted = int(result.verdict.num_accepted[i]), int(result.num_admitted[i])
        proposal = state.drafter.last
        if accepted < admitted and proposal is not None and proposal.logits is not None:
            left = raw[start + accepted].softmax(-1) - proposal.logits[0, accepted].softmax(-1)
            raw[start + accepted] = left.clamp_min(1e-12).log()
    return replace(result, raw_logits=Scored(raw))


def temperatures(plan: Plan, result: StepResult, __: Sabotage) -> StepResult:
    """Logits divided by the temperature of the next request in the batch."""
    processed, raw = result.processed_logits.clone(), result.raw_logits.clone()
    own = [entry.state.params.temperature or 1.0 for entry in plan]
    for i, (start, end) in enumerate(windows(result)):
        other = own[(i + 1) % len(own)]
        processed[start:end] *= own[i] / other
        raw[start:end] /= other
    return replace(result, processed_logits=Scored(processed), raw_logits=Scored(raw))


SCORING: dict[str, Callable[[Plan, StepResult, Sabotage], StepResult]] = {
    "row shifted": shifted,
    "row shifted back": lambda plan, result, state: shifted(plan, result, state, -1),
    "neighbour": neighbours,
    "zero row": zero_rows,
    "draft": drafts,
    "residual": residuals,
    "temperature": temperatures,
}
