"""The engine: requests in, outputs out, one step at a time. No threads, no HTTP, no chat."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from emberline.batch import KVSpec
from emberline.cache.page_pool import PagePool
from emberline.cache.radix import RadixCache
from emberline.config import EngineConfig
from emberline.engine.flights import Flights
from emberline.engine.grammar import Compiled, GrammarCompiler
from emberline.engine.outcome import Outcome, Runner
from emberline.engine.outputs import delta
from emberline.engine.pace import Pace
from emberline.engine.plain_step import run_plain
from emberline.engine.plan import ScheduledRequest
from emberline.engine.prediction import Prediction
from emberline.engine.readers import Readers
from emberline.engine.request_state import (
    Ending,
    RequestState,
    TextStream,
    append_run,
    append_whole,
)
from emberline.engine.scheduler import Scheduler
from emberline.engine.scoring import most_scored
from emberline.engine.step import StepParts
from emberline.engine.tally import Tally
from emberline.engine.trace import Observer
from emberline.engine.validation import check_ids, check_length, check_options
from emberline.sampling.keys import request_seed
from emberline.types import (
    TIMED_OUT,
    EngineSnapshot,
    FinishReason,
    Grammar,
    InvalidRequest,
    Request,
    RequestOutput,
    StepCounts,
)
from emberline.verify.planner import DevicePlanner, Planner

CHECK_SECONDS = 10.0
"""Least time between two full checks of the pages, which take milliseconds."""
LOOKAHEAD = 64
"""Tokens for which a request gets pages at once where the host must plan quickly."""


class Engine:
    """Continuous batching over one target and at most one drafter. Not thread-safe.

    `observer`, where one is set, is told each step's blocks of the drafter.
    `grammars` compiles what requests ask to be bound by.
    """

    def __init__(
        self,
        parts: StepParts,
        pool: PagePool,
        config: EngineConfig,
        info: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.parts = parts
        self._pool = pool
        self._clock = clock  # seconds; deadlines are its
        self.config = config
        self.info = dict(info or {})
        self.vocab_size = parts.target.vocab_size
        self.max_model_len = parts.history.shape[1]
        self.max_draft_tokens = parts.drafter.max_draft_tokens if parts.drafter else 0
        cache = make_cache(parts, pool, config.cache.prefix_cache)
        self._cache_len = cache.longest(config.scheduler.prefill_chunk)
        self.max_request_tokens = min(self.max_model_len, self._cache_len)  # prompt and answer
        self._scheduler = Scheduler(
            config.scheduler,
            cache,
            self.max_draft_tokens,
            most_scored(self.vocab_size, parts.history.device),
        )
        self._states: dict[str, RequestState] = {}
        self._readers = Readers(clock)
        self._tally = Tally()
        self._pace = Pace()
        self._num_added = 0
        self._gpu = parts.history.device.index or None  # None: the CPU, or the GPU that is current
        self._flights = Flights(pool.page_size, self._tally.add)
        self._next_check = -math.inf
        self._look_at = math.inf  # when a request may have to end early: no sooner
        self.observer: Observer | None = None
        self.grammars = grammars

    def use_runner(self, runner: Runner, *, overlap: bool) -> None:
        """Run the steps of whom it takes by a runner. `overlap`: a step is read one step later."""
        self._flights.use(runner, overlap=overlap)
        self._scheduler.lookahead = LOOKAHEAD

    @property
    def runner(self) -> Runner | None:
        """What runs steps without waiting for them; None: every step is a plain one."""
        return self._flights.runner

    @property
    def pool(self) -> PagePool:
        """The pages. Whoever borrows some while nothing runs gives them back before a step."""
        return self._pool

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._states)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._states)

    def use_planner(self, planner: Planner, name: str, ahead: DevicePlanner | None = None) -> None:
        """Plan by another policy from the next step on, while nothing is in flight.

        Args:
            planner: of plain steps.
            name: what `info` says.
            ahead: of steps that run behind the host: an object of its own, for a planner counts
                steps.

        Raises:
            ValueError: there are such steps, and nothing to plan them by.
        """
        if self.runner is not None:
            if ahead is None:
                raise ValueError("steps run behind the host here: give `ahead`, their planner")
            self.runner.planner = ahead
        self.parts = replace(self.parts, planner=planner)
        self.info["planner"] = name

    def compile(self, grammar: Grammar) -> Compiled:
        """A grammar, compiled now or before. From any thread; a big one takes seconds.

        Raises:
            InvalidRequest: it does not compile, or there is no tokenizer to compile it for.
        """
        if self.grammars is None:
            raise InvalidRequest("a grammar needs a tokenizer", "grammar")
        return self.grammars.compile(grammar)

    def known_grammar(self, grammar: Grammar) -> Compiled | None:
        """A grammar that is compiled already. From any thread, and never waits."""
        return self.grammars.known(grammar) if self.grammars is not None else None

    def add(
        self, request: Request, text: TextStream | None = None, compiled: Compiled | None = None
    ) -> None:
        """Queue a request. Never blocks, but to compile a grammar that comes without `compiled`.

        Raises:
            InvalidRequest: it can never run; `param` names the field.
            QueueFull: too many wait already.
        """
        self._check(request, has_text=text is not None)
        params = request.params
        if params.grammar is not None and compiled is None:
            compiled = self.compile(params.grammar)
        room = self.max_model_len if params.max_tokens is None else params.max_tokens
        limit = min(len(request.prompt_token_ids) + room, self.max_model_len, self._cache_len)
        now = self._clock()
        state = RequestState(
            request=request,
            text=text,
            seed=request_seed(params.seed, request.choice, secrets.randbits(63)),
            length_limit=limit,
            stop_ids=frozenset() if params.ignore_eos else self.parts.eos_ids,
            token_ids=list(request.prompt_token_ids),
            serial=self._num_added,
            arrived=now,
            deadline=now + (math.inf if request.timeout is None else request.timeout),
            matcher=compiled.matcher() if compiled is not None else None,
            prediction=Prediction(request.prediction) if request.prediction else None,
            prompt_scores=None if params.prompt_logprobs is None else [],
        )
        # Who watches blocks needs what only the plain step tells, and so does a prompt that is only
        # scored: whether its last logits are sound.
        if self.runner is not None and self.observer is None and state.num_remaining > 0:
            state.behind = self.runner.takes(state)
        self._scheduler.add(state, self._pace.seconds_to_next())
        self._states[request.request_id] = state
        self._readers.add(state)
        self._look_at = min(self._look_at, state.deadline)
        self._num_added += 1

    def abort(self, request_id: str) -> None:
        """End a request at the next step. Unknown or finished ids are ignored."""
        if request_id in self._states:
            self._states[request_id].aborted = True
            self._look_at = -math.inf

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it added to each request that gained something.

        After a failed one requests go on from what was read before it.
        """
        self._use_gpu()
        try:
            return self._step()
        except BaseException:
            self._start_over()
            raise

    def get_ready(self) -> bool:
        """While there is no work: do one thing that later steps would wait for.

        Returns:
            False: there is none. A thing takes some tens of milliseconds.
        """
        if self.runner is None or self.has_work:
            return False
        self._use_gpu()
        return self.runner.get_ready()

    def _use_gpu(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # of this thread: kernels run on its current one

    def _step(self) -> list[RequestOutput]:
        outputs, flights = self._end_early(), self._flights
        flights.go_on(self._scheduler.repeats)
        while flights and not flights.is_batch and self._scheduler.may_preempt():
            outputs += self._land()
        plan = self._scheduler.schedule()
        if plan is not flights.plan:
            now = self._clock()
            for entry in plan:
                if entry.state.first_run is None:
                    entry.state.first_run = now
        others = flights.launch(plan)
        while flights.are_due:
            outputs += self._land()
        if others:
            outputs += self._run(others)
        if self._readers.are_due:
            flights.write()
            outputs += self._readers.tell()
        if not self._states:
            self._check_books()
        return outputs

    def _start_over(self) -> None:
        """Forget what is on its way: its results would be of steps that nobody has read."""
        self._flights.forget()
        self._scheduler.forget_flights()
        self.parts.planner.abandon()

    def _check_books(self) -> None:
        """While nothing runs: free + cached = all, and now and then every page by itself."""
        self._scheduler.check_counts()
        if self._clock() >= self._next_check:
            self._scheduler.check()
            self._next_check = self._clock() + CHECK_SECONDS

    def snapshot(self) -> EngineSnapshot:
        """Counters since the start, and what is held now.

        Drafts of requests that go on together are counted a few steps late.
        """
        tally = self._tally
        return EngineSnapshot(
            num_engine_steps=tally.num_engine_steps,
            prompt_tokens=tally.prompt_tokens,
            generation_tokens=tally.generation_tokens,
            num_verify_steps=tally.num_verify_steps,
            num_emitted_tokens=tally.num_emitted_tokens,
            num_draft_tokens=tally.num_draft_tokens,
            num_accepted_tokens=tally.num_accepted_tokens,
            accepted_per_pos=tally.accepted_per_pos(self.max_draft_tokens),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_usage=1 - self._scheduler.cache.num_available / self._pool.num_pages,
            num_cached_pages_share=self._scheduler.cache.num_idle / self._pool.num_pages,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_query_tokens=self._scheduler.num_queried,
            prefix_hit_tokens=self._scheduler.num_hit,
        )

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        self._scheduler.cache.clear()

    def _end_early(self) -> list[RequestOutput]:
        """End what was aborted and what has run out of time."""
        now, endings = self._clock(), []
        if now < self._look_at:
            return []
        self._look_at = math.inf
        for state in self._states.values():
            if state.aborted:
                endings.append((state, Ending(FinishReason.ABORT)))
            elif now >= state.deadline:
                endings.append((state, Ending(FinishReason.ABORT, TIMED_OUT)))
            else:
                self._look_at = min(self._look_at, state.deadline)
        return [self._finish(state, ending) for state, ending in endings]

    def _land(self) -> list[RequestOutput]:
        """Read the oldest step in flight."""
        landed = self._flights.land()
        if not landed.is_settled:
            return self._commit(landed.plan, landed.outcome)
        self._tally.num_engine_steps += 1
        self._tally.generation_tokens += len(landed.outcome.token_ids)
        return []

    def _run(self, plan: list[ScheduledRequest]) -> list[RequestOutput]:
        """Run a step and wait for it."""
        outcome = run_plain(self.parts, plan, self.observer)
        for entry in plan:
            entry.state.launch(entry.num_known, entry.draft_limit, samples=entry.samples)
            entry.state.placed = False
        return self._commit(plan, outcome, tells=True)

    def _commit(
        self, plan: Sequence[ScheduledRequest], outcome: Outcome, *, tells: bool = False
    ) -> list[RequestOutput]:
        """Append what was emitted, cut at stops; count, finish, free.

        `tells`: at once, and not when readers are due. First tokens and endings always are.
        """
        self._tally.num_engine_steps += 1
        outputs, steps, scheduler = [], [], self._scheduler
        standing = scheduler.standing
        columns = zip(plan, outcome.runs(), outcome.counts(), outcome.record_runs(), strict=True)
        for i, (entry, run, counts, records) in enumerate(columns):
            state = entry.state
            if state.slot < 0:
                continue  # it ended while the step was on its way
            if outcome.broken and i in outcome.broken:
                outputs.append(self._fail(state, outcome.broken[i]))
                continue
            is_first, ending = len(state.token_ids) == state.num_prompt, None
            state.land(counts[2], entry.draft_limit, samples=entry.samples)
            if not append_whole(state, run):
                run, ending = append_run(state, run)
                counts = _cut(counts, len(run))
            if not run and not ending and state.num_remaining <= 0 and state.num_pending <= 0:
                ending = Ending(FinishReason.LENGTH)  # a prompt that was only to be scored
            if ending is None and not (state.shared and state.slot in standing):
                scheduler.computed(state)
            if is_first and (run or ending):
                self._tally.prompt_tokens += state.num_prompt
            elif run:
                state.count_step(counts)
                steps.append(counts)
            self._tally.generation_tokens += len(run)
            if records is not None:
                state.held_records.append(records[: len(run)])
            if ending is not None:
                outputs.append(self._finish(state, ending))
            elif run and (is_first or tells) and state.request.stream:
                outputs.append(delta(state, self._clock))
        self._tally.add(Counter(steps))
        return outputs

    def _fail(self, state: RequestState, error: str) -> RequestOutput:
        """End a request whose logits are no distribution. What it left is nobody's to read."""
        for pool in self.parts.kv_pools:
            pool.clear(self._scheduler.held.private(state))
        return self._finish(state, Ending(FinishReason.ERROR, error=error))

    def _finish(self, state: RequestState, ending: Ending) -> RequestOutput:
        """Forget a request and free what it holds; its last output."""
        self._flights.dissolve()
        state.forget_flights()
        self._scheduler.remove(state, keep=ending.reason is not FinishReason.ERROR)
        self._pace.finished()
        del self._states[state.request.request_id]
        self._readers.forget(state)
        return replace(
            delta(state, self._clock, final=True),
            finish_reason=ending.reason,
            stop_reason=ending.stop_reason,
            error=ending.error,
        )

    def validate(self, request: Request, *, has_text: bool) -> None:
        """Raise `InvalidRequest` for what can never run. `has_text`: a tokenizer follows along."""
        self._check(request, has_text=has_text)
        if request.params.grammar is not None:
            self.compile(request.params.grammar)

    def _check(self, request: Request, *, has_text: bool) -> None:
        if request.request_id in self._states:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        check_ids(request, self.vocab_size)
        check_options(request, has_text=has_text)
        check_length(request, self.max_model_len, self._cache_len)


def make_cache(parts: StepParts, pool: PagePool, enabled: bool) -> RadixCache:
    """The prefix cache that fits a target and its drafter: their pages are the same."""
    specs: list[KVSpec | None] = [parts.target.kv_spec]
    if parts.drafter is not None:
        specs.append(parts.drafter.kv_spec)
    kept = [spec for spec in specs if spec is not None]
    windows = [spec.window for spec in kept if spec.window is not None]
    return RadixCache(
        pool,
        lookahead=max((spec.lookahead for spec in kept), default=0),
        window=max(windows) if windows and len(windows) == len(kept) else None,
        enabled=enabled,
    )


def _cut(counts: StepCounts, num_kept: int) -> StepCounts:
    """Of a step whose run was cut: drafts behind a stop were not accepted."""
    drafted, admitted, accepted, _, predicted = counts
    return drafted, admitted, min(accepted, num_kept), num_kept, predicted
