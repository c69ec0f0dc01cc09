"""Which requests run in a step, how many tokens each forwards, and in which pages.

No phases: every request catches up `num_computed` with its tokens, within a token budget and the
pages there are. Decode is one pending token, prefill is more. Must not know tensors or models.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from emberline.cache.page_pool import PagePool
from emberline.config import SchedulerConfig
from emberline.engine.request_state import RequestState
from emberline.types import QueueFull

PROMPT_SCORE_TOKENS = 128
"""Most prompt tokens scored in one step, of all requests: bounds the [tokens, V] logits."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step."""

    state: RequestState
    num_known: int  # tokens forwarded whose ids are known: a prompt chunk, or the anchor
    draft_limit: int  # most drafts that may follow them
    num_scored: int  # trailing known tokens that get logits
    samples: bool  # whether a token is emitted after the last of them


@dataclass(frozen=True, slots=True)
class _Budget:
    """What a step may still take on."""

    tokens: int  # known tokens
    scored: int  # prompt tokens with logits

    def after(self, entry: ScheduledRequest) -> _Budget:
        scored = entry.num_known if entry.state.scores_prompt else 0
        return _Budget(self.tokens - entry.num_known, self.scored - scored)


class Scheduler:
    """Owns the queue, the running set and the pages of every request."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, max_draft_tokens: int) -> None:
        self.config = config
        self.pool = pool
        self.max_draft_tokens = max_draft_tokens
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []  # oldest first
        self.num_preemptions = 0
        self._free_slots = list(range(config.max_num_reqs - 1, -1, -1))

    def add(self, state: RequestState, retry_after: int) -> None:
        """Queue a request; `QueueFull` with the given advice when the limit is reached."""
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(self.config.max_queue, retry_after)
        self.waiting.append(state)

    def remove(self, state: RequestState) -> None:
        """Forget a request, wherever it is, and free what it holds."""
        if state.slot >= 0:
            self.running.remove(state)
            self._release(state)
        else:
            self.waiting.remove(state)

    def schedule(self) -> list[ScheduledRequest]:
        """Plan one step: decodes first, so that a long prompt never delays a running answer."""
        budget = _Budget(self.config.max_num_tokens, PROMPT_SCORE_TOKENS)
        num_preemptions = self.num_preemptions
        planned: list[ScheduledRequest] = []
        for state in sorted(self.running, key=lambda s: s.num_pending > 1):
            if state.slot < 0:  # preempted for an older request in this very loop
                continue
            entry = self._entry(state, budget)
            if entry.num_known and self._reserve(state, entry):
                planned.append(entry)
                budget = budget.after(entry)
        # A request preempted later in the loop than it was planned must not run.
        planned = [entry for entry in planned if entry.state.slot >= 0]
        if self.num_preemptions > num_preemptions:  # what gave way must not come back at once
            return planned
        while self.waiting and self._free_slots:
            entry = self._entry(self.waiting[0], budget)
            # The whole sequence must fit beside what the others still need for theirs, else
            # somebody would only be preempted again.
            promised = sum(self._pages_to_come(state) for state in self.running)
            room = self.pool.num_free - promised
            if not entry.num_known or self._pages_to_come(entry.state) > room:
                break
            state = self.waiting.popleft()
            state.slot = self._free_slots.pop()
            self.running.append(state)
            self._grow(state, entry)
            planned.append(entry)
            budget = budget.after(entry)
        if self.waiting and not self.running:
            raise RuntimeError("nothing runs, and the first request of the queue cannot start")
        return planned

    def check(self) -> None:
        """Raise `RuntimeError` unless every page is free or held by a running request."""
        self.pool.check(state.pages for state in self.running)

    def _pages_to_come(self, state: RequestState) -> int:
        """Pages that a request still has to get for its tokens and the next one."""
        tokens = min(len(state.token_ids) + 1, state.length_limit)
        return max(0, self.pool.pages_for(tokens) - len(state.pages))

    def _entry(self, state: RequestState, budget: _Budget) -> ScheduledRequest:
        num_known = min(state.num_pending, self.config.prefill_chunk, budget.tokens)
        if state.scores_prompt:
            num_known = min(num_known, budget.scored)
        reaches_end = num_known == state.num_pending
        samples = reaches_end and state.num_remaining > 0
        decodes = samples and num_known == 1 and state.num_output > 0
        drafts = self.max_draft_tokens if decodes and state.params.speculate else 0
        num_scored = int(samples)
        if state.scores_prompt:
            # The logits of position p - 1 score the token at p; position 0 has no value.
            first = max(state.params.prompt_logprobs_start, 1) - 1
            end = state.num_computed + num_known
            num_scored = max(num_scored, min(num_known, end - first))
        limit = max(0, min(drafts, state.num_remaining - 1))
        return ScheduledRequest(state, num_known, limit, num_scored, samples)

    def _reserve(self, state: RequestState, entry: ScheduledRequest) -> bool:
        """Get a running request's pages, preempting younger ones; False if it gave way itself."""
        while self._missing_pages(entry) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        self._grow(state, entry)
        return True

    def _missing_pages(self, entry: ScheduledRequest) -> int:
        end = entry.state.num_computed + entry.num_known + entry.draft_limit
        return max(0, self.pool.pages_for(end) - len(entry.state.pages))

    def _grow(self, state: RequestState, entry: ScheduledRequest) -> None:
        state.pages += self.pool.allocate(self._missing_pages(entry))

    def _preempt(self, state: RequestState) -> None:
        """Free a request's pages and queue it first: it recomputes, its client sees nothing."""
        self.running.remove(state)
        self._release(state)
        state.num_computed = 0
        if state.scores_prompt:
            state.prompt_scores = []
        self.waiting.appendleft(state)
        self.num_preemptions += 1

    def _release(self, state: RequestState) -> None:
        self.pool.release(state.pages)
        state.pages = []
        self._free_slots.append(state.slot)
        state.slot = -1
        state.num_written = 0
