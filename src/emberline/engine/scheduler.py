"""Which requests run in a step, how many tokens each forwards, and in which pages.

No phases: every request catches up `num_computed` with its tokens, within budgets of tokens, drafts
and pages. Decode is one pending token, prefill is more. Must not know tensors or models.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from operator import attrgetter

from emberline.cache.radix import RadixCache
from emberline.config import SchedulerConfig
from emberline.engine.held_pages import HeldPages, first_scored
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.engine.underway import PrefixesUnderway
from emberline.types import QueueFull

AMPLE = 4
"""Times as many pages are taken ahead while half of all are free."""
MOST_REPEATS = 64
"""Steps at most that a plan is repeated without another look at the requests."""

GATHERING = 32
"""Requests that run for each step that those who come wait for others to start with: behind the
host prompts run as a step of their own, which delays all of them by as much whatever it carries."""
MOST_GATHERING = 8
"""Steps that anybody waits for that at most."""

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class _Budget:
    """What a step may still take on."""

    tokens: int  # known tokens
    scored: int  # prompt tokens with logits

    def after(self, entry: ScheduledRequest) -> _Budget:
        scored = entry.num_scored if entry.state.scores_prompt else 0
        return _Budget(self.tokens - entry.num_known, self.scored - scored)


class Scheduler:
    """Owns the queue and the running set; what pages they have is `HeldPages`' to change.

    Args:
        config: limits of a step and of the queue.
        cache: of the pages.
        max_draft_tokens: of a request and step.
        most_scored: prompt tokens scored in one step, of all requests.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: RadixCache,
        max_draft_tokens: int,
        most_scored: int,
    ) -> None:
        self.config = config
        self.most_scored = most_scored
        self.cache = cache
        self.max_draft_tokens = max_draft_tokens
        self.waiting: list[RequestState] = []  # by rank
        self.running: list[RequestState] = []  # by rank
        self.num_preemptions = 0
        self.num_queried = 0  # prompt tokens looked up in the cache
        self.num_hit = 0  # of those, found
        # Tokens for which a request that runs behind the host gets pages at once.
        self.lookahead = 0
        self.held = HeldPages(cache, config.prefill_chunk)
        self._free_slots = list(range(config.max_num_reqs - 1, -1, -1))
        self._standing: dict[int, ScheduledRequest] = {}  # by slot: what it runs step after step
        self._plan: list[ScheduledRequest] = []  # of the last step, if nobody was planned anew
        self._num_repeats = 0  # steps for which it is good without another look
        self._num_gathering = 0  # steps since prompts ran

    def add(self, state: RequestState, retry_after: int) -> None:
        """Queue a request; `QueueFull` with the given advice when the limit is reached."""
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(self.config.max_queue, retry_after)
        bisect.insort(self.waiting, state, key=_rank)

    def remove(self, state: RequestState, *, keep: bool = True) -> None:
        """Forget a request, wherever it is. `keep`: what it computed stays in the cache."""
        if state.slot < 0:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        self._release(state, keep=keep)

    def forget_flights(self) -> None:
        """Steps on their way will not be read: everybody goes on from what is known here."""
        for state in self.running:
            state.forget_flights()
            state.placed = False
        self._standing.clear()
        self._plan_anew()

    def schedule(self) -> list[ScheduledRequest]:
        """Plan one step: decodes first, so that a long prompt never delays a running answer.

        The same list as before: the same requests go on, in the same pages.
        """
        self._num_gathering += 1
        nobody_starts = not self._may_start()
        if self._num_repeats and nobody_starts:
            self._num_repeats -= 1
            return self._plan
        steady = self._steady()
        if len(steady) == len(self.running) and nobody_starts:
            if self.cache.window is not None:
                return steady  # in fewer and fewer pages
            self._num_repeats = min(map(self._num_steps_to_go, steady), default=0)
            if steady != self._plan:
                self._plan = steady
            return self._plan
        self._plan_anew()
        if len(steady) < len(self._standing):
            # Whoever will need pages soon gets them now too: planning costs everybody time.
            steady = self._steady(self.lookahead * (AMPLE if self.held.are_ample(0) else 1) // 2)
        budget = _Budget(self.config.max_num_tokens - len(steady), self.most_scored)
        going_on = {entry.state.slot for entry in steady}
        others = [state for state in self.running if state.slot not in going_on]
        num_preemptions = self.num_preemptions
        planned: list[ScheduledRequest] = []
        for state in sorted(others, key=lambda s: s.num_pending > 1):
            if state.slot < 0:  # preempted for another request in this very loop
                continue
            entry = self._entry(state, budget)
            if entry.num_known and self._reserve(state, entry.num_known):
                planned.append(entry)
                budget = budget.after(entry)
        # A request preempted later in the loop than it was planned must not run.
        planned = [entry for entry in planned if entry.state.slot >= 0]
        steady = [entry for entry in steady if entry.state.slot >= 0]
        others = [state for state in others if state.slot >= 0]
        has_prompts = not all(entry.decodes for entry in planned)
        # What gave way must not come back at once.
        if self.num_preemptions == num_preemptions and (has_prompts or not nobody_starts):
            started = self._admit(budget, others)
            planned += started
            others += [entry.state for entry in started]
            has_prompts = has_prompts or bool(started)
        if self.waiting and not self.running:
            raise RuntimeError("nothing runs, and the first request of the queue cannot start")
        if has_prompts:
            self._num_gathering = 0
        num_drafts = sum(entry.draft_limit for entry in steady)
        return steady + self._with_drafts(planned, others, num_drafts)

    def _may_start(self, num_steps: int = 0) -> bool:
        """Whether somebody who waits may start, this many steps from now."""
        if not (self.waiting and self._free_slots):
            return False
        wait = min(MOST_GATHERING, len(self.running) // GATHERING) if self.lookahead else 0
        return self._num_gathering + num_steps > wait

    def repeats(self, num_steps_to_go: Callable[[], int]) -> bool:
        """Whether the next plan is the last one again.

        Args:
            num_steps_to_go: steps for which everybody in it certainly has pages.
        """
        if not self._plan or self._may_start(1):
            return False
        if not self._num_repeats:
            self._num_repeats = max(0, min(MOST_REPEATS, num_steps_to_go()))
        return self._num_repeats > 0

    def _plan_anew(self) -> None:
        """Requests or their pages have changed."""
        self._plan, self._num_repeats = [], 0

    @property
    def standing(self) -> Container[int]:
        """Slots of requests that go on in the pages that they have till these are filled."""
        return self._standing if self.cache.window is None else ()

    def _num_steps_to_go(self, entry: ScheduledRequest) -> int:
        """Steps for which a request certainly has pages, besides the next one."""
        state, room = entry.state, len(entry.state.pages) * self.cache.pool.page_size
        if room >= state.length_limit:
            return MOST_REPEATS
        width = 1 + entry.draft_limit
        return min(MOST_REPEATS, (room - state.reach) // width - 1)

    def _steady(self, ahead: int = 0) -> list[ScheduledRequest]:
        """What requests go on running that have pages for it; the others are to be looked at.

        Draft limits are those of an earlier step: the device keeps to the length that is left.
        `ahead`: tokens that there must be pages for besides.
        """
        entries, size = [], self.cache.pool.page_size
        for state in self.running:  # `num_remaining` and `end_after`, asked of everybody
            entry = self._standing.get(state.slot)
            limit = state.length_limit
            if entry is None or limit <= len(state.token_ids) + state.num_unread:
                continue
            end = state.num_computed + state.ahead + 1 + entry.draft_limit + ahead
            if len(state.pages) * size >= min(end, limit):
                entries.append(entry)
        return entries

    def may_preempt(self) -> bool:
        """Whether the next step might lack pages for those who run.

        Steps in flight have to be read before that: whoever gives way recomputes all it has.
        """
        most = self.cache.pool.pages_for(self.config.prefill_chunk) + 1
        if len(self.running) * most <= self.cache.num_available:
            return False
        known = (min(s.num_pending, self.config.prefill_chunk) for s in self.running)
        missing = map(self.held.missing, self.running, known)
        return sum(missing) > self.cache.num_available

    def computed(self, state: RequestState) -> None:
        """Note that a step has computed more of a request and found nothing wrong with it.

        Its prompt goes into the cache as soon as it is whole, so that others can share it while it
        runs. Pages that its window has left behind are let go, and those of rejected drafts.
        """
        if state.is_sound and state.num_pending <= 1 and not state.shared:
            self.held.share(state)
            state.shared = True
        if state.shared and state.slot in self.standing:
            return
        self._plan_anew()
        self.held.trim(state)

    def check_counts(self) -> None:
        """Raise `RuntimeError` unless every page is free or idle in the cache: nothing runs."""
        have, all_pages = self.cache.num_available, self.cache.pool.num_pages
        if have != all_pages:
            raise RuntimeError(f"nothing runs, but {have} of {all_pages} pages are free or cached")

    def check(self) -> None:
        """Raise `RuntimeError` unless every page is free, cached or held by a running request."""
        self.cache.check(state.pages for state in self.running)

    def _admit(self, budget: _Budget, others: list[RequestState]) -> list[ScheduledRequest]:
        """Start requests of the queue, in order, for as long as there is room for the next.

        `others`: those who run and still need pages.

        One that had better wait is passed over, but keeps its place: who comes after it gets a slot
        and pages only beside what it will take.
        """
        planned = []
        # The whole sequence must fit beside what the others still need for theirs, else somebody
        # would only be preempted again.
        promised = sum(self.held.to_come(state) for state in others)
        underway = PrefixesUnderway(self.cache, self.running)
        for state in self.waiting[: len(self._free_slots)]:
            if not budget.tokens:
                break
            self.held.find_prefix(state)
            if self.held.to_come(state) > self.cache.num_available - promised:
                self.held.let_go(state)
                break
            entry = self._entry(state, budget)
            if not entry.num_known or underway.hold_most_of(state):
                self.held.let_go(state)
                promised += self.held.to_come(state)
                continue
            self.waiting.remove(state)
            bisect.insort(self.running, state, key=_rank)
            state.slot = self._free_slots.pop()
            if state.num_cached is None:
                state.num_cached = state.num_computed
                self.num_queried += self.held.num_looked_up(state)
                self.num_hit += state.num_cached
            self.held.grow(state, entry.num_known)
            underway.add(state)
            promised += self.held.to_come(state)
            planned.append(entry)
            budget = budget.after(entry)
        return planned

    def _entry(self, state: RequestState, budget: _Budget) -> ScheduledRequest:
        """What a request would run within the budget, with as many drafts as it could use."""
        num_known = min(state.num_pending, self.config.prefill_chunk, budget.tokens)
        if state.num_unread and state.num_remaining <= 0:
            num_known = 0  # what is in flight is its last token
        # The logits of position p - 1 score the token at p; position 0 has no value.
        start = first_scored(state)
        if state.scores_prompt:
            unscored = max(0, start - state.num_computed)
            num_known = min(num_known, unscored + budget.scored)
        reaches_end = num_known == state.num_pending
        samples = reaches_end and state.num_remaining > 0
        decodes = samples and num_known == 1 and state.has_begun
        drafts = state.most_drafts(self.max_draft_tokens) if decodes else 0
        # At its end a sequence gets logits even if nothing is drawn: they say whether it is sound.
        num_scored = int(reaches_end)
        if state.scores_prompt:
            end = state.num_computed + num_known
            num_scored = max(num_scored, min(num_known, end - start))
        limit = max(0, min(drafts, state.num_remaining - 1))
        return ScheduledRequest(state, num_known, limit, num_scored, samples, decodes)

    def _reserve(self, state: RequestState, num_tokens: int) -> bool:
        """Get the pages of a running request's next tokens, if need be from those behind it.

        Returns:
            Whether it can run in this step: it may have had to give way itself.
        """
        while self.held.missing(state, num_tokens) > self.cache.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        self.held.grow(state, num_tokens)
        return True

    def _with_drafts(
        self, planned: list[ScheduledRequest], others: list[RequestState], num_drafts: int
    ) -> list[ScheduledRequest]:
        """The plan with drafts as far as the verify budget and pages that nobody needs go.

        Drafts are a gamble: nobody who runs or starts gives way for them, now or in a later step.

        Args:
            planned: what runs besides those who go on as before.
            others: those who run and still need pages.
            num_drafts: drafts of those who go on as before.
        """
        budget = self.config.max_verify_tokens - num_drafts
        promised = sum(self.held.to_come(state) for state in others)
        spare = max(0, self.cache.num_available - promised)
        entries = []
        for entry in planned:
            state, drafts = entry.state, min(entry.draft_limit, max(0, budget))
            room = (len(state.pages) + spare) * self.cache.pool.page_size
            if room < state.length_limit:
                drafts = min(drafts, room - state.end_after(entry.num_known))
            spare -= self.held.missing(state, entry.num_known + drafts)
            self.held.grow(state, entry.num_known + drafts)
            budget -= drafts
            if drafts != entry.draft_limit:
                entry = replace(entry, draft_limit=drafts)
            entries.append(entry)
            if self.lookahead and state.behind and entry.decodes:
                spare -= self._look_ahead(entries[-1], spare)
        return entries

    def _look_ahead(self, entry: ScheduledRequest, spare: int) -> int:
        """Get pages for a request's next steps too, so that they need no planning.

        Returns:
            How many of the `spare` pages it took.
        """
        state, tokens = entry.state, entry.num_known + entry.draft_limit
        missing = self.held.missing(state, tokens + AMPLE * self.lookahead)
        if not self.held.are_ample(missing):
            missing = self.held.missing(state, tokens + self.lookahead)
        if missing > spare:
            return 0
        state.pages += self.cache.allocate(missing)
        self._standing[state.slot] = entry
        return missing

    def _preempt(self, state: RequestState) -> None:
        """Free a request's pages and queue it again: it recomputes, its client sees nothing."""
        self.running.remove(state)
        self._release(state, keep=True)
        if state.scores_prompt:
            state.prompt_scores = []
        bisect.insort(self.waiting, state, key=_rank)
        self.num_preemptions += 1

    def _release(self, state: RequestState, *, keep: bool) -> None:
        if keep and state.is_sound:
            self.held.share(state)
        self.held.let_go(state)
        self._free_slots.append(state.slot)
        self._standing.pop(state.slot, None)
        self._plan_anew()
        state.slot = -1
        state.placed = False
        state.shared = False
        state.num_written = 0
