"""The live audit: a sample of finished requests is rescored by teacher forcing in idle time.

Owns the sampling, the backlog and when the engine may be used; nothing that a client gets changes.
Must not know HTTP.

A sampled request is asked for its raw log-probabilities even where its client did not ask; they are
taken out of its outputs on their way. Rescoring waits until no call has been there for
`QUIET_SECONDS`, and is given up, to be begun again later, as soon as one comes: what a client may
notice is the end of one step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from emberline.engine.running_engine import EngineStopped, RunningEngine
from emberline.server.audit_metrics import AuditMetrics
from emberline.server.rescoring import Finished, compare, reproduction
from emberline.types import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs

logger = logging.getLogger(__name__)

QUIET_SECONDS = 0.5
"""How long no call must have been there: shorter pauses are those of a client that goes on."""
MAX_BACKLOG = 64
"""Finished requests that wait to be rescored; the oldest is dropped for the next."""
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.25


def default_tolerance(info: Mapping[str, object]) -> float:
    """Nats by which values of an engine may differ between two ways of computing them."""
    return BFLOAT16_TOLERANCE if info.get("dtype") == "bfloat16" else FLOAT32_TOLERANCE


class LiveAudit:
    """Rescores a sample of finished requests while the engine has nothing else to do.

    Belongs to one event loop. `run` does the work, every call passes through a `watch`.

    Args:
        engine: what answers and what rescores.
        rate: share of the requests that are sampled, 0 to 1.
        tolerance: largest difference in nats that passes.
        metrics: where results are counted.
        draw: a fresh number in [0, 1).
    """

    def __init__(
        self,
        engine: RunningEngine,
        rate: float,
        tolerance: float,
        metrics: AuditMetrics,
        draw: random.Random | None = None,
    ) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"rate must be in [0, 1], got {rate}")
        if not tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        self.rate, self.tolerance, self.metrics = rate, tolerance, metrics
        self._engine = engine
        self._draw = draw or random.Random()
        self._backlog: deque[Finished] = deque()
        self._filled = asyncio.Event()  # set while there is a backlog
        self._calls: set[Watch] = set()
        self._free = asyncio.Event()  # set while no call is there
        self._free.set()
        self._num_watched = 0
        self._scoring: asyncio.Task[None] | None = None
        self._ids = itertools.count()

    def watch(self, requests: Sequence[Request]) -> Watch:
        """Let a call's requests through, which may not have been submitted yet."""
        watch = Watch(self, requests, [i for i in range(len(requests)) if self._samples()])
        self._num_watched += 1
        self._calls.add(watch)
        self._free.clear()
        if self._scoring is not None:
            self._scoring.cancel()
        return watch

    def finished(self, request: Finished) -> None:
        """Queue a request that was sampled."""
        self._backlog.append(request)
        if len(self._backlog) > MAX_BACKLOG:
            self._backlog.popleft()
            self.metrics.count("dropped")
        self._note_backlog()

    def left(self, watch: Watch) -> None:
        """A call is over."""
        self._calls.discard(watch)
        if not self._calls:
            self._free.set()

    def info(self) -> dict[str, object]:
        """What `/server_info` says."""
        return {
            "rate": self.rate,
            "tolerance": self.tolerance,
            "backlog": len(self._backlog),
            **self.metrics.totals(),
        }

    async def run(self) -> None:
        """Rescore what comes until cancelled, or until the engine takes no more requests."""
        while True:
            await self._filled.wait()
            await self._quiet()
            request = self._backlog.popleft()
            self._note_backlog()
            self._scoring = asyncio.ensure_future(self._rescore(request))
            try:
                await asyncio.wait([self._scoring])
            finally:
                self._scoring.cancel()  # of no effect unless this very task is being cancelled
                await asyncio.wait([self._scoring])
            if self._scoring.cancelled():  # a call came
                self._backlog.appendleft(request)
                self._note_backlog()
                continue
            problem = self._scoring.exception()
            if isinstance(problem, EngineStopped):
                return
            if problem is not None:
                name = request.request.request_id
                logger.error("could not rescore request %s", name, exc_info=problem)
                self.metrics.count("error")

    def _samples(self) -> bool:
        return self._draw.random() < self.rate

    def _note_backlog(self) -> None:
        self.metrics.backlog(len(self._backlog))
        if self._backlog:
            self._filled.set()
        else:
            self._filled.clear()

    async def _quiet(self) -> None:
        """Wait until no call has been there for a while, and nothing runs or waits."""
        while True:
            await self._free.wait()
            before = self._num_watched
            await asyncio.sleep(QUIET_SECONDS)
            now = self._engine.snapshot()
            alone = not self._calls and before == self._num_watched
            if alone and not (now.num_running or now.num_waiting):
                return

    async def _rescore(self, finished: Finished) -> None:
        """Score a request again and report the difference.

        Raises:
            EngineStopped: the engine has ended, or is about to.
            RuntimeError: it gave the request up.
        """
        request = finished.scoring_request(f"audit-{next(self._ids)}")
        outputs = [output async for output in self._engine.generate(request)]
        self.metrics.rescored(len(request.prompt_token_ids))
        last = outputs[-1]
        if last.finish_reason is FinishReason.ABORT:
            raise EngineStopped(last.error or "aborted")
        records = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
        if records is None or last.finish_reason is FinishReason.ERROR:
            raise RuntimeError(last.error or "the engine gave no log-probabilities")
        comparison = compare(finished, records)
        self.metrics.compared(comparison.abs_diffs)
        if comparison.max_abs_diff <= self.tolerance:
            self.metrics.count("passed")
            return
        self.metrics.count("failed")
        logger.error(
            "log-probabilities differ from a rescoring: %s",
            reproduction(finished, comparison, self.tolerance),
        )


@dataclass(slots=True)
class _Sampled:
    """A request on its way."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Watch:
    """One call's requests and outputs, passing through the audit. `requests` go to the engine."""

    def __init__(
        self, audit: LiveAudit, requests: Sequence[Request], sampled: Sequence[int]
    ) -> None:
        self._audit = audit
        self._sampled = {i: _Sampled(requests[i]) for i in sampled}
        self.requests = [
            replace(request, params=_with_raw(request.params)) if i in self._sampled else request
            for i, request in enumerate(requests)
        ]

    def take(self, index: int, output: RequestOutput) -> RequestOutput:
        """The output of request `index` as its client asked for it."""
        sampled = self._sampled.get(index)
        if sampled is None:
            return output
        sampled.token_ids += output.token_ids
        sampled.logprobs += [record.logprob for record in output.logprobs or ()]
        if output.finished:
            del self._sampled[index]
            if output.finish_reason is not FinishReason.ERROR and sampled.token_ids:
                ids, logprobs = tuple(sampled.token_ids), tuple(sampled.logprobs)
                self._audit.finished(Finished(sampled.request, ids, logprobs))
        return _as_asked(output, sampled.request.params)

    def close(self) -> None:
        """The call is over; what has not finished is not audited."""
        self._audit.left(self)


def _with_raw(params: SamplingParams) -> SamplingParams:
    """The same options, with raw log-probabilities of every token."""
    if params.logprobs is None:
        return replace(params, logprobs=0, logprobs_mode="raw")
    return replace(params, logprobs_mode="both") if params.logprobs_mode == "processed" else params


def _as_asked(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """The output without what only the audit wanted."""
    if params.logprobs is None:
        return replace(output, logprobs=None)
    if params.logprobs_mode != "processed":
        return output
    return replace(output, logprobs=tuple(map(_processed, output.logprobs or ())))


def _processed(record: TokenLogprobs) -> TokenLogprobs:
    assert record.processed is not None
    return record.processed._replace(annotation=record.annotation)
