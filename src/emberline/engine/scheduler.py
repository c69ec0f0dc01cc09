"""Which requests run in a step, how many tokens each forwards, and in which pages.

No phases: every request catches up `num_computed` with its tokens, within budgets of tokens, drafts
and pages. Decode is one pending token, prefill is more. Must not know tensors or models.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from operator import attrgetter

from emberline.cache.radix import NO_PAGE, RadixCache
from emberline.config import SchedulerConfig
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.engine.underway import PrefixesUnderway
from emberline.types import QueueFull

PROMPT_SCORE_TOKENS = 128
"""Most prompt tokens scored in one step, of all requests: bounds the [tokens, V] logits."""

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
    """Owns the queue, the running set and the pages of every request."""

    def __init__(self, config: SchedulerConfig, cache: RadixCache, max_draft_tokens: int) -> None:
        self.config = config
        self.cache = cache
        self.max_draft_tokens = max_draft_tokens
        self.waiting: list[RequestState] = []  # by rank
        self.running: list[RequestState] = []  # by rank
        self.num_preemptions = 0
        self.num_queried = 0  # prompt tokens looked up in the cache
        self.num_hit = 0  # of those, found
        self.lookahead = (
            0  # tokens for which a request that runs behind the host gets pages at once
        )
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
            steady = self._steady(self.lookahead * (AMPLE if self._is_ample(0) else 1) // 2)
        budget = _Budget(self.config.max_num_tokens - len(steady), PROMPT_SCORE_TOKENS)
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
        missing = map(self._missing_pages, self.running, known)
        return sum(missing) > self.cache.num_available

    def computed(self, state: RequestState) -> None:
        """Note that a step has computed more of a request and found nothing wrong with it.

        Its prompt goes into the cache as soon as it is whole, so that others can share it while it
        runs. Pages that its window has left behind are let go, and those of rejected drafts.
        """
        if state.is_sound and state.num_pending <= 1 and not state.shared:
            self._share(state)
            state.shared = True
        if state.shared and state.slot in self.standing:
            return
        self._plan_anew()
        end = self.cache.pool.pages_for(max(len(state.token_ids), state.reach))
        self.cache.release(state.pages[end:])
        del state.pages[end:]
        first = min(self.cache.first_kept(state.num_final), len(state.pages))
        behind = [page for page in state.pages[:first] if page != NO_PAGE]
        if behind:
            self.cache.release(behind)
            state.pages[:first] = [NO_PAGE] * first

    def private_pages(self, state: RequestState) -> list[int]:
        """Pages that nobody else can read."""
        return [p for p in state.pages if p != NO_PAGE and self.cache.pool.num_refs(p) == 1]

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
        promised = sum(self._pages_to_come(state) for state in others)
        underway = PrefixesUnderway(self.cache, self.running)
        for state in self.waiting[: len(self._free_slots)]:
            if not budget.tokens:
                break
            self._find_prefix(state)
            if self._pages_to_come(state) > self.cache.num_available - promised:
                self._lose_pages(state)
                break
            entry = self._entry(state, budget)
            if not entry.num_known or underway.hold_most_of(state):
                self._lose_pages(state)
                promised += self._pages_to_come(state)
                continue
            self.waiting.remove(state)
            bisect.insort(self.running, state, key=_rank)
            state.slot = self._free_slots.pop()
            if state.num_cached is None:
                state.num_cached = state.num_computed
                self.num_queried += self._num_looked_up(state)
                self.num_hit += state.num_cached
            self._grow(state, entry.num_known)
            underway.add(state)
            promised += self._pages_to_come(state)
            planned.append(entry)
            budget = budget.after(entry)
        return planned

    def _find_prefix(self, state: RequestState) -> None:
        """Take what the cache has of a request that does not run.

        At least one token must be left to compute, and no position whose logits are wanted may be
        skipped: prompt scores need those from the position before the first scored one on.
        """
        limit = len(state.token_ids) - 1
        if state.scores_prompt:
            limit = min(limit, _first_scored(state))
        state.pages = self.cache.match(state.token_ids, limit)
        state.num_computed = len(state.pages) * self.cache.pool.page_size

    def _num_looked_up(self, state: RequestState) -> int:
        """Prompt tokens that could be found, were they cached: those that are scored never are."""
        if not self.cache.enabled:
            return 0
        return _first_scored(state) if state.scores_prompt else state.num_prompt

    def _pages_to_come(self, state: RequestState) -> int:
        """Pages that a request still has to get for its tokens and the next one."""
        known = len(state.token_ids) + state.num_unread + state.ahead
        tokens = min(known + 1, state.length_limit)
        at_once = min(self.config.prefill_chunk, tokens - state.num_computed)
        num_held = len(state.pages) - state.pages.count(NO_PAGE)
        return max(0, self.cache.most_held(tokens, at_once) - num_held)

    def _entry(self, state: RequestState, budget: _Budget) -> ScheduledRequest:
        """What a request would run within the budget, with as many drafts as it could use."""
        num_known = min(state.num_pending, self.config.prefill_chunk, budget.tokens)
        if state.num_unread and state.num_remaining <= 0:
            num_known = 0  # what is in flight is its last token
        # The logits of position p - 1 score the token at p; position 0 has no value.
        first_scored = _first_scored(state)
        if state.scores_prompt:
            unscored = max(0, first_scored - state.num_computed)
            num_known = min(num_known, unscored + budget.scored)
        reaches_end = num_known == state.num_pending
        samples = reaches_end and state.num_remaining > 0
        decodes = samples and num_known == 1 and state.has_begun
        drafts = state.most_drafts(self.max_draft_tokens) if decodes else 0
        # At its end a sequence gets logits even if nothing is drawn: they say whether it is sound.
        num_scored = int(reaches_end)
        if state.scores_prompt:
            end = state.num_computed + num_known
            num_scored = max(num_scored, min(num_known, end - first_scored))
        limit = max(0, min(drafts, state.num_remaining - 1))
        return ScheduledRequest(state, num_known, limit, num_scored, samples, decodes)

    def _reserve(self, state: RequestState, num_tokens: int) -> bool:
        """Get the pages of a running request's next tokens, if need be from those behind it.

        Returns:
            Whether it can run in this step: it may have had to give way itself.
        """
        while self._missing_pages(state, num_tokens) > self.cache.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        self._grow(state, num_tokens)
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
        promised = sum(self._pages_to_come(state) for state in others)
        spare = max(0, self.cache.num_available - promised)
        entries = []
        for entry in planned:
            state, drafts = entry.state, min(entry.draft_limit, max(0, budget))
            room = (len(state.pages) + spare) * self.cache.pool.page_size
            if room < state.length_limit:
                drafts = min(drafts, room - state.end_after(entry.num_known))
            spare -= self._missing_pages(state, entry.num_known + drafts)
            self._grow(state, entry.num_known + drafts)
            budget -= drafts
            entries.append(replace(entry, draft_limit=drafts))
            if self.lookahead and state.behind and entry.decodes:
                spare -= self._look_ahead(entries[-1], spare)
        return entries

    def _look_ahead(self, entry: ScheduledRequest, spare: int) -> int:
        """Get pages for a request's next steps too, so that they need no planning.

        Returns:
            How many of the `spare` pages it took.
        """
        state, tokens = entry.state, entry.num_known + entry.draft_limit
        missing = self._missing_pages(state, tokens + AMPLE * self.lookahead)
        if not self._is_ample(missing):
            missing = self._missing_pages(state, tokens + self.lookahead)
        if missing > spare:
            return 0
        state.pages += self.cache.allocate(missing)
        self._standing[state.slot] = entry
        return missing

    def _is_ample(self, num_pages: int) -> bool:
        """Whether half of all pages are free once so many are taken."""
        return self.cache.num_available - num_pages >= self.cache.pool.num_pages // 2

    def _missing_pages(self, state: RequestState, num_tokens: int) -> int:
        """Pages that the next `num_tokens` tokens of a request still lack."""
        return max(0, self.cache.pool.pages_for(state.end_after(num_tokens)) - len(state.pages))

    def _grow(self, state: RequestState, num_tokens: int) -> None:
        state.pages += self.cache.allocate(self._missing_pages(state, num_tokens))

    def _preempt(self, state: RequestState) -> None:
        """Free a request's pages and queue it again: it recomputes, its client sees nothing."""
        self.running.remove(state)
        self._release(state, keep=True)
        if state.scores_prompt:
            state.prompt_scores = []
        bisect.insort(self.waiting, state, key=_rank)
        self.num_preemptions += 1

    def _share(self, state: RequestState) -> None:
        """Give the cache a request's full pages of final tokens."""
        count = state.num_final // self.cache.pool.page_size
        state.pages[:count] = self.cache.insert(state.token_ids, state.pages[:count])

    def _release(self, state: RequestState, *, keep: bool) -> None:
        if keep and state.is_sound:
            self._share(state)
        self._lose_pages(state)
        self._free_slots.append(state.slot)
        self._standing.pop(state.slot, None)
        self._plan_anew()
        state.slot = -1
        state.placed = False
        state.shared = False
        state.num_written = 0

    def _lose_pages(self, state: RequestState) -> None:
        self.cache.release(state.pages)
        state.pages = []
        state.num_computed = 0


def _first_scored(state: RequestState) -> int:
    """The first position of a scored prompt whose logits are wanted."""
    return max(state.params.prompt_logprobs_start, 1) - 1
