"""The scheduler alone: who runs, how much, in which pages. No engine, no model, no drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from emberline.cache.page_pool import PagePool
from emberline.cache.radix import NO_PAGE, RadixCache
from emberline.config import SchedulerConfig
from emberline.engine.plan import ScheduledRequest
from emberline.engine.request_state import RequestState
from emberline.engine.scheduler import MOST_GATHERING, Scheduler
from emberline.types import QueueFull, Request, SamplingParams, TokenLogprobs

SIZE = 4
MOST_SCORED = 128
Plan = dict[str, ScheduledRequest]


class Rig:
    """A scheduler, and steps of a model that says 7 and accepts as many drafts as it is told."""

    def __init__(
        self,
        num_pages: int = 64,
        drafts: int = 0,
        *,
        window: int | None = None,
        lookahead: int = 0,
        cache: bool = True,
        **config: int,
    ) -> None:
        self.pool = PagePool(num_pages + 1, SIZE)
        self.cache = RadixCache(self.pool, lookahead=lookahead, window=window, enabled=cache)
        self.config = SchedulerConfig(**{"max_num_reqs": 8, **config}).on("cpu")
        self.scheduler = Scheduler(self.config, self.cache, drafts, MOST_SCORED)
        self.states: dict[str, RequestState] = {}

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        max_tokens: int = 50,
        priority: int = 0,
        **params: object,
    ) -> RequestState:
        """Queue a request; a prompt given by its length is like no other's."""
        serial = len(self.states)
        ids = [1000 * serial + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        options = SamplingParams(temperature=0, max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        state = RequestState(
            request=Request(name, tuple(ids), options, priority=priority),
            text=None,
            seed=0,
            length_limit=len(ids) + max_tokens,
            stop_ids=frozenset(),
            token_ids=list(ids),
            serial=serial,
            prompt_scores=None if options.prompt_logprobs is None else [],
        )
        self.scheduler.add(state, 1)
        self.states[name] = state
        return state

    def plan(self) -> Plan:
        """Schedule a step, and check what holds for every one."""
        before = {s.request.request_id: s.num_computed for s in self.scheduler.running}
        entries = self.scheduler.schedule()
        assert sum(e.num_known for e in entries) <= self.config.max_num_tokens
        assert sum(e.draft_limit for e in entries) <= self.config.max_verify_tokens
        slots = [s.slot for s in self.scheduler.running]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < self.config.max_num_reqs for slot in slots)
        for entry in entries:
            state, start = entry.state, entry.state.num_computed
            assert state in self.scheduler.running
            assert before.get(state.request.request_id, start) == start
            assert entry.num_known >= 1
            assert entry.draft_limit >= 0
            # Every token has a page to be written to, and nobody else sees it.
            for position in range(start, start + entry.num_known + entry.draft_limit):
                assert self.pool.num_refs(state.pages[position // SIZE]) == 1
            for page in state.pages[self.cache.first_needed(start) :]:
                assert page != NO_PAGE
        self.scheduler.check()
        return {e.state.request.request_id: e for e in entries}

    def commit(self, plan: Plan, accept: int = 0) -> None:
        for entry in plan.values():
            state = entry.state
            accepted = min(accept, entry.draft_limit)
            if state.scores_prompt:
                end = state.num_computed + entry.num_known
                missing = min(end + 1, state.num_prompt) - len(state.prompt_scores)
                state.prompt_scores += [TokenLogprobs(0, 0.0, 1)] * missing
            state.num_written = len(state.token_ids)
            state.num_computed += entry.num_known + accepted
            state.token_ids += [7] * (accepted + 1) * entry.samples
            if state.num_remaining <= 0 and state.num_pending <= 1:
                self.scheduler.remove(state)
            else:
                self.scheduler.computed(state)

    def step(self, accept: int = 0) -> Plan:
        plan = self.plan()
        self.commit(plan, accept)
        return plan

    def known(self, plan: Plan) -> dict[str, int]:
        return {name: entry.num_known for name, entry in plan.items()}

    def names(self, states: Sequence[RequestState]) -> list[str]:
        return [state.request.request_id for state in states]

    @property
    def running(self) -> list[str]:
        return self.names(self.scheduler.running)

    @property
    def waiting(self) -> list[str]:
        return self.names(self.scheduler.waiting)


def test_requests_start_by_priority_and_then_by_arrival():
    rig = Rig(max_num_reqs=2)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        rig.add(name, 3, max_tokens=1, priority=priority)
    assert rig.waiting == ["d", "b", "c", "a"]
    assert list(rig.step()) == ["d", "b"]
    assert list(rig.step()) == ["c", "a"]


def test_decodes_come_before_prompts_whoever_ranks_first():
    rig = Rig(max_num_tokens=8, max_num_reqs=4)
    rig.add("answer", 3, priority=5)
    rig.step()
    rig.add("prompt", 20, priority=-5)
    assert rig.known(rig.step()) == {"answer": 1, "prompt": 7}
    assert rig.running == ["prompt", "answer"]
    # The prompt ranks first now, and still takes only what the answer leaves.
    assert rig.known(rig.step()) == {"answer": 1, "prompt": 7}


def test_a_prompt_runs_in_chunks_and_emits_after_the_last():
    rig = Rig(prefill_chunk=8)
    rig.add("a", 20)
    seen = [rig.step()["a"] for _ in range(4)]
    assert [e.num_known for e in seen] == [8, 8, 4, 1]
    assert [e.samples for e in seen] == [False, False, True, True]
    assert [e.num_scored for e in seen] == [0, 0, 1, 1]


def test_a_step_takes_no_more_tokens_than_it_may():
    rig = Rig(max_num_tokens=16, prefill_chunk=12)
    for name in "abc":
        rig.add(name, 12)
    assert rig.known(rig.step()) == {"a": 12, "b": 4}
    assert rig.known(rig.step()) == {"a": 1, "b": 8, "c": 7}


def test_drafts_are_not_charged_to_the_token_budget():
    """E13: with 4 drafts each, two prompts of 12 tokens still fit a budget of 24."""
    rig = Rig(drafts=4, max_num_tokens=24)
    rig.add("a", 12)
    rig.add("b", 12)
    assert rig.known(rig.step()) == {"a": 12, "b": 12}
    rig = Rig(drafts=4, max_num_tokens=26)
    for name in "ab":
        rig.add(name, 3)
    rig.step()
    rig.add("c", 12)
    rig.add("d", 12)
    plan = rig.step()
    assert rig.known(plan) == {"a": 1, "b": 1, "c": 12, "d": 12}
    assert [e.draft_limit for e in plan.values()] == [4, 4, 0, 0]


def test_drafts_have_a_budget_of_their_own():
    rig = Rig(drafts=4, max_verify_tokens=6)
    for name in "abc":
        rig.add(name, 3)
    rig.step()
    plan = rig.step()
    assert {name: e.draft_limit for name, e in plan.items()} == {"a": 4, "b": 2, "c": 0}
    assert rig.known(plan) == {"a": 1, "b": 1, "c": 1}


def test_nobody_drafts_past_the_end_nor_against_its_will():
    rig = Rig(drafts=4)
    rig.add("short", 3, max_tokens=3)
    rig.add("plain", 3, speculate=False)
    rig.step()
    plan = rig.step(accept=1)
    assert {name: e.draft_limit for name, e in plan.items()} == {"short": 1, "plain": 0}
    assert rig.running == ["plain"]


def test_nobody_drafts_before_its_first_token():
    rig = Rig(drafts=4, prefill_chunk=3)
    rig.add("one", 1)
    rig.add("four", 4)
    assert [rig.step()["one"].draft_limit for _ in range(2)] == [0, 4]
    assert rig.states["four"].num_output == 1


def test_drafts_take_no_page_that_another_needs():
    """Not even when they are asked for first: they shrink before anybody gives way."""
    rig = Rig(3, drafts=4)
    rig.add("a", 3)
    rig.add("b", 4)
    rig.step()
    plan = rig.step()
    assert rig.known(plan) == {"a": 1, "b": 1}
    assert {name: e.draft_limit for name, e in plan.items()} == {"a": 0, "b": 3}
    assert rig.scheduler.num_preemptions == 0


def test_drafts_leave_what_a_prompt_was_promised():
    rig = Rig(7, drafts=12, prefill_chunk=4)
    rig.add("a", 3, max_tokens=20)
    rig.step()
    rig.add("b", 15, max_tokens=1)
    for _ in range(4):
        plan = rig.step()
        assert set(plan) == {"a", "b"}
    assert rig.scheduler.num_preemptions == 0


def test_the_one_that_ranks_last_gives_way():
    rig = Rig(6, max_num_reqs=3)
    rig.add("old", 6)
    rig.add("first", 6, priority=-1)
    rig.add("young", 6)
    plan = rig.step()
    assert list(plan) == ["first", "old", "young"]
    for _ in range(2):
        rig.step()
    plan = rig.step()  # "first" needs its third page
    assert list(plan) == ["first", "old"]
    assert rig.waiting == ["young"]
    assert rig.scheduler.num_preemptions == 1
    state = rig.states["young"]
    assert (state.slot, state.pages, state.num_computed, state.num_written) == (-1, [], 0, 0)
    assert len(state.token_ids) == 9  # what it has said stays said
    rig.scheduler.remove(rig.states["first"])
    assert "young" in rig.step()
    # It asks the cache again, but that was no second prompt.
    assert (rig.scheduler.num_queried, rig.scheduler.num_hit, state.num_cached) == (18, 0, 0)


def test_one_that_gave_way_is_queued_by_its_rank():
    rig = Rig(6, max_num_reqs=3)
    for name in ("a", "b", "c"):
        rig.add(name, 6)
    rig.step()
    rig.add("later", 6)
    rig.add("urgent", 6, priority=-1)
    while not rig.scheduler.num_preemptions:
        rig.step()
    assert rig.waiting == ["urgent", "c", "later"]


def test_one_that_gave_way_is_queued_even_if_the_queue_is_full():
    rig = Rig(6, max_num_reqs=3, max_queue=3)
    for name in ("a", "b", "c"):
        rig.add(name, 6)
    rig.step()
    for name in ("d", "e", "f"):
        rig.add(name, 6)
    while not rig.scheduler.num_preemptions:
        rig.step()
    assert rig.waiting == ["c", "d", "e", "f"]
    with pytest.raises(QueueFull, match="queue of 3 requests is full"):
        rig.add("g", 6)


def test_one_without_anybody_behind_it_gives_way_itself():
    rig = Rig(4, max_num_reqs=3)
    rig.add("a", 5, max_tokens=11)
    rig.add("b", 7, max_tokens=9)
    for _ in range(2):
        assert list(rig.step()) == ["a", "b"]
    assert list(rig.step()) == ["a"]  # "b" needs its third page
    assert rig.waiting == ["b"]
    while "b" not in rig.step():
        pass
    assert rig.states["a"].num_remaining == 0


def test_pages_of_rejected_drafts_are_given_back():
    """D22: nobody gives way for a page that another keeps for drafts alone."""
    rig = Rig(6, drafts=12)
    rig.add("a", 4, max_tokens=12, speculate=False)
    rig.add("b", 1, max_tokens=20)
    rig.step()
    plan = rig.plan()
    assert plan["b"].draft_limit == 12
    assert len(rig.states["b"].pages) == 4
    rig.commit(plan)
    assert len(rig.states["b"].pages) == 1
    for _ in range(5):
        assert list(rig.step()) == ["a", "b"]
    assert rig.scheduler.num_preemptions == 0


def test_nobody_starts_in_a_step_in_which_somebody_gave_way():
    rig = Rig(7, max_num_reqs=3)
    rig.add("a", 6)
    rig.add("b", 14)
    for _ in range(2):
        assert list(rig.step()) == ["a", "b"]
    rig.add("urgent", 4, max_tokens=1, priority=-1)  # two pages, one is free
    assert list(rig.step()) == ["a", "b"]
    assert rig.scheduler.num_preemptions == 0
    assert list(rig.step()) == ["a"]  # "b" needed its fifth page and gave up four
    assert rig.waiting == ["urgent", "b"]
    assert list(rig.step()) == ["a", "urgent"]


def test_prompt_scores_of_half_a_prompt_are_forgotten_with_its_pages():
    rig = Rig(prefill_chunk=4)
    scored = rig.add("scored", 20, max_tokens=1, prompt_logprobs=0)
    for _ in range(3):
        rig.step()
    assert len(scored.prompt_scores) == 13
    rig.scheduler._preempt(scored)
    assert scored.prompt_scores == []
    assert scored.scores_prompt
    rig.scheduler.check()
    while scored in [*rig.scheduler.running, *rig.scheduler.waiting]:
        rig.step()
    assert len(scored.prompt_scores) == 20


def test_prompt_scores_that_are_whole_are_kept():
    rig = Rig(prefill_chunk=19)
    scored = rig.add("scored", 20, max_tokens=5, prompt_logprobs=0)
    rig.step()
    assert (len(scored.prompt_scores), scored.num_pending) == (20, 1)
    rig.scheduler._preempt(scored)
    assert len(scored.prompt_scores) == 20
    # What is scored was computed and found sound, so it may be taken from the cache.
    assert rig.known(rig.plan()) == {"scored": 4}


def test_a_slot_is_used_again():
    rig = Rig(max_num_reqs=2)
    rig.add("a", 3, max_tokens=1)
    rig.add("b", 3, max_tokens=3)
    rig.step()
    slot = rig.states["b"].slot
    rig.add("c", 3)
    rig.step()
    assert {rig.states["b"].slot, rig.states["c"].slot} == {0, 1}
    assert rig.states["b"].slot == slot
    assert rig.states["a"].slot == -1


def test_the_queue_is_bounded():
    rig = Rig(max_queue=2)
    rig.add("a", 3)
    rig.add("b", 3)
    with pytest.raises(QueueFull, match="try again in 1 s"):
        rig.add("c", 3)
    rig.step()
    rig.add("d", 3)


def test_prompts_start_only_beside_what_others_still_need():
    rig = Rig(16, prefill_chunk=8)
    for name in "abc":
        rig.add(name, 30, max_tokens=1)
    started = {}
    for number in range(20):
        for name in rig.step():
            started.setdefault(name, number)
    # 8 pages each: two fit, the third starts when one of them is done.
    assert started == {"a": 0, "b": 0, "c": 4}
    assert rig.scheduler.num_preemptions == 0


def test_a_prompt_starts_only_where_its_first_token_fits_too():
    rig = Rig(5)
    rig.add("a", 8, max_tokens=4)
    rig.add("b", 8, max_tokens=4)  # two pages would be there, but not the third
    assert list(rig.step()) == ["a"]


def test_a_prompt_that_is_only_scored_needs_no_room_for_a_token():
    rig = Rig(2)
    rig.add("a", 8, max_tokens=0, prompt_logprobs=0)
    assert rig.known(rig.step()) == {"a": 8}
    assert rig.running == []


def test_who_does_not_fit_is_not_overtaken():
    rig = Rig(16)
    rig.add("a", 40, max_tokens=3)
    rig.step()
    rig.add("large", 40)
    rig.add("small", 3)
    assert list(rig.step()) == ["a"]
    assert rig.waiting == ["large", "small"]
    assert list(rig.step()) == ["a"]
    assert list(rig.step()) == ["large", "small"]


def test_a_request_that_fits_nowhere_is_an_error_not_a_wait():
    rig = Rig(4)
    rig.add("a", 17)
    with pytest.raises(RuntimeError, match="cannot start"):
        rig.plan()


# Requests that share a prefix.

LONG = list(range(500, 540))


def starts(rig: Rig, names: Sequence[str], steps: int = 30) -> dict[str, int]:
    """The step in which each request first runs."""
    first: dict[str, int] = {}
    for number in range(steps):
        for name in rig.step():
            first.setdefault(name, number)
        if set(first) >= set(names):
            return first
    raise AssertionError(f"only {sorted(first)} ran")


def test_a_prefix_that_is_being_computed_is_waited_for_and_not_a_step_longer():
    rig = Rig(prefill_chunk=8)
    rig.add("a", LONG)
    rig.add("b", [*LONG, 1, 2, 3])
    rig.add("c", LONG)
    # Five chunks, the last one in step 4.
    assert starts(rig, ["a", "b", "c"]) == {"a": 0, "b": 5, "c": 5}
    assert rig.states["b"].num_cached == 40
    assert rig.states["c"].num_cached == 36  # one token is left to compute
    assert (rig.scheduler.num_queried, rig.scheduler.num_hit) == (40 + 43 + 40, 40 + 36)


def test_others_start_while_a_prefix_is_waited_for():
    rig = Rig(prefill_chunk=8)
    rig.add("a", LONG)
    rig.add("b", LONG)
    rig.add("other", 6)
    assert starts(rig, ["a", "b", "other"]) == {"a": 0, "b": 5, "other": 0}


def test_who_waits_for_a_prefix_keeps_its_slot():
    rig = Rig(prefill_chunk=8, max_num_reqs=2)
    rig.add("a", LONG)
    rig.add("b", LONG)
    rig.add("other", 6)
    first = starts(rig, ["a", "b"])
    assert first == {"a": 0, "b": 5}


def test_who_waits_for_a_prefix_keeps_its_pages():
    rig = Rig(24, prefill_chunk=8)
    rig.add("a", LONG, max_tokens=4)
    rig.add("b", LONG, max_tokens=4)
    rig.add("other", 40)
    # 11 pages each: "other" would take what "b" needs for itself.
    first = starts(rig, ["a", "b", "other"])
    assert first["b"] == 5
    assert first["other"] >= 5


@pytest.mark.parametrize(
    ("prompt", "waits"),
    [
        (LONG, True),
        ([*LONG[:20], *range(20)], True),  # half of it
        ([*LONG[:16], *range(24)], False),  # less than half
        ([*LONG, *range(7)], True),  # and goes on
        (LONG[:5], False),  # all of it, but the other has much further to go
        ([*LONG[:10], *range(9)], False),  # the other has a little more than twice as far
        ([*LONG[:12], *range(8)], True),
        (LONG[:4], False),  # its only page holds its last token: nothing to be had
        (LONG[:3], False),
        ([*range(20), *LONG[20:]], False),  # the same middle after another beginning
    ],
)
def test_only_what_is_most_of_a_prompt_is_waited_for(prompt, waits):
    rig = Rig(prefill_chunk=8)
    rig.add("a", LONG)
    rig.add("b", prompt)
    assert (starts(rig, ["b"])["b"] > 0) == waits


@pytest.mark.parametrize("same", [20, 21])
def test_pages_whose_lookahead_differs_are_not_waited_for(same):
    rig = Rig(lookahead=1, prefill_chunk=8)
    rig.add("a", LONG)
    rig.add("b", [*LONG[:same], *range(40 - same)])
    assert (starts(rig, ["b"])["b"] > 0) == (same == 21)


def test_the_same_middle_after_another_cached_beginning_is_not_waited_for():
    rig = Rig(prefill_chunk=8)
    one, other = list(range(8)), list(range(100, 108))
    rig.add("one", [*one, 1], max_tokens=1)
    rig.add("other", [*other, 1], max_tokens=1)
    rig.step()
    rig.step()
    rig.add("a", [*one, *LONG])
    rig.add("b", [*other, *LONG])
    assert starts(rig, ["b"])["b"] == 0
    assert rig.states["b"].num_cached == 8


def test_nobody_waits_for_one_that_ranks_behind_it():
    rig = Rig(prefill_chunk=8)
    rig.add("a", LONG)
    rig.step()
    rig.add("urgent", LONG, priority=-1)
    assert starts(rig, ["urgent"])["urgent"] == 0


def test_nobody_waits_without_a_cache():
    rig = Rig(prefill_chunk=8, cache=False)
    rig.add("a", LONG)
    rig.add("b", LONG)
    assert starts(rig, ["a", "b"]) == {"a": 0, "b": 0}


def test_nobody_waits_for_an_answer_to_end():
    """What goes beyond a prompt comes into the cache at the end only: that can be long."""
    rig = Rig()
    a = rig.add("a", 8)
    for _ in range(10):
        rig.step()
    rig.add("b", [*a.token_ids[:17], 1])
    assert "b" in rig.step()
    assert rig.states["b"].num_cached == 8


def test_prompts_that_are_scored_neither_wait_nor_are_waited_for():
    rig = Rig(prefill_chunk=8)
    rig.add("a", LONG, prompt_logprobs=0)
    rig.add("b", LONG)
    rig.add("c", LONG, prompt_logprobs=0)
    assert starts(rig, ["a", "b", "c"]) == {"a": 0, "b": 0, "c": 0}


def test_who_waits_for_one_that_is_gone_starts():
    rig = Rig(prefill_chunk=8)
    rig.add("a", LONG)
    rig.add("b", LONG)
    rig.step()
    rig.scheduler.remove(rig.states["a"])
    assert rig.known(rig.step()) == {"b": 8}
    assert rig.states["b"].num_cached == 0  # half a prompt was not shown to be sound


def test_who_waits_for_a_prefix_can_be_removed():
    rig = Rig(prefill_chunk=8)
    rig.add("a", LONG, max_tokens=1)
    rig.add("b", LONG)
    rig.step()
    rig.scheduler.remove(rig.states["b"])
    assert rig.waiting == []
    while rig.running:
        rig.step()
    rig.scheduler.check()


def test_what_is_computed_again_is_waited_for_until_it_is_whole():
    """One that gave way computes its sequence in chunks again; the first of them is not all."""
    rig = Rig(prefill_chunk=8)
    a = rig.add("a", LONG)
    for _ in range(6):
        rig.step()
    rig.scheduler._preempt(a)
    rig.cache.clear()
    rig.add("b", LONG)
    first = starts(rig, ["a", "b"])
    assert (first["a"], first["b"]) == (0, 6)
    assert rig.states["b"].num_cached == 36


def test_a_prompt_is_shared_when_it_is_whole_and_an_answer_when_it_ends():
    rig = Rig(prefill_chunk=8)
    a = rig.add("a", 12, max_tokens=9)
    rig.step()
    assert (a.shared, rig.cache.num_idle) == (False, 0)
    rig.step()
    assert a.shared
    assert len(rig.cache.match(a.token_ids, 99)) == 3
    rig.cache.release(a.pages[:3])
    while rig.running:
        rig.step()
    # 21 tokens, the last of them never computed.
    assert rig.cache.num_idle == 5


def test_what_must_not_be_kept_is_not():
    rig = Rig()
    a = rig.add("a", 8)
    for _ in range(6):
        rig.step()
    assert a.num_computed == 13
    assert rig.scheduler.held.private(a) == a.pages[2:]  # its prompt was shared when it was whole
    rig.scheduler.remove(a, keep=False)
    assert rig.cache.num_idle == 2
    rig.scheduler.check()


# Prompt scores.


def test_a_step_scores_few_tokens_and_whoever_else_waits_goes_on():
    rig = Rig(256, max_num_tokens=1024)
    for name in ("a", "b"):
        rig.add(name, 200, prompt_logprobs=0)
    rig.add("plain", 6)
    plan = rig.step()
    # "b" has no logits to itself yet; that is no reason for the next one to wait.
    assert rig.known(plan) == {"a": MOST_SCORED, "plain": 6}
    plan = rig.step()
    assert rig.known(plan) == {"plain": 1, "a": 72, "b": MOST_SCORED - 72}


def test_only_tokens_with_logits_are_charged_to_the_scores():
    rig = Rig(256)
    rig.add("a", 400, prompt_logprobs=0, prompt_logprobs_start=390)
    (entry,) = rig.step().values()
    assert (entry.num_known, entry.num_scored) == (400, 11)
    rig = Rig(256)
    rig.add("a", 400, prompt_logprobs=0, prompt_logprobs_start=201)
    entry = rig.step()["a"]
    assert (entry.num_known, entry.num_scored) == (200 + MOST_SCORED, MOST_SCORED)
    entry = rig.step()["a"]
    assert (entry.num_known, entry.num_scored, entry.samples) == (72, 72, True)


@pytest.mark.parametrize(
    ("start", "cached"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)]
)
def test_no_position_whose_logits_are_wanted_is_taken_from_the_cache(start, cached):
    """A41: the score of position s needs the logits of position s - 1."""
    rig = Rig()
    rig.add("a", LONG[:14], max_tokens=1)
    rig.step()
    rig.add("b", LONG[:14], prompt_logprobs=0, prompt_logprobs_start=start)
    (entry,) = rig.step().values()
    assert rig.states["b"].num_cached == cached
    assert entry.num_scored == 14 - max(start - 1, 0)


# A sliding window.


def test_a_long_sequence_needs_no_more_pages_than_its_window():
    rig = Rig(5, window=9, prefill_chunk=4)
    a = rig.add("a", 60, max_tokens=40)
    while rig.running or rig.waiting:
        rig.step()
        held = [page for page in a.pages if page != NO_PAGE]
        assert len(held) <= rig.cache.most_held(100, 4)
    assert a.num_remaining == 0
    assert rig.scheduler.num_preemptions == 0


def test_with_a_window_two_run_where_their_prompts_would_not_fit():
    rig = Rig(9, window=9, prefill_chunk=4)
    rig.add("a", 60, max_tokens=3)
    rig.add("b", 60, max_tokens=3)
    rig.add("c", 60, max_tokens=3)
    assert list(rig.step()) == ["a", "b"]  # 4 pages each
    while rig.running or rig.waiting:
        rig.step()
    assert rig.scheduler.num_preemptions == 0


def test_with_a_window_a_request_is_promised_what_it_still_needs():
    rig = Rig(7, window=9, prefill_chunk=4)
    rig.add("a", 60, max_tokens=9)
    for _ in range(6):
        rig.step()
    rig.add("b", 60, max_tokens=1)  # 4 pages are free, but the fourth one "a" will need
    while rig.running or rig.waiting:
        assert len(rig.step()) == 1
    assert rig.scheduler.num_preemptions == 0


def test_with_a_window_an_answer_is_promised_less_than_a_prompt():
    rig = Rig(8, window=9, prefill_chunk=16)
    rig.add("a", 40)
    for _ in range(4):
        rig.step()
    rig.add("b", 6)
    assert list(rig.step()) == ["a", "b"]


@pytest.mark.parametrize("seed", range(40))
def test_any_load_comes_to_rest_with_its_books_in_order(seed):
    """`Rig.plan` checks every step; here they come in any order, with ends in any state."""
    chance = random.Random(seed)
    window = chance.choice([None, None, 6, 20])
    rig = Rig(
        chance.choice([12, 16, 30]),
        drafts=chance.choice([0, 3, 9]),
        window=window,
        cache=chance.random() < 0.8,
        prefill_chunk=chance.choice([3, 8, 64]),
        max_num_reqs=chance.choice([1, 3, 6]),
        max_num_tokens=chance.choice([8, 20, 100]),
        max_verify_tokens=chance.choice([2, 100]),
    )
    stems = [[10_000 * i + j for j in range(24)] for i in range(2)]
    for number in range(25):
        for _ in range(chance.choice([0, 1, 3])):
            prompt = chance.choice(stems)[: chance.randrange(25)]
            prompt = [*prompt, *(chance.randrange(2) for _ in range(chance.randint(1, 9)))]
            scored = chance.random() < 0.2
            rig.add(
                f"r{len(rig.states)}",
                prompt,
                max_tokens=chance.randint(1, 14),
                priority=chance.choice([0, 0, 1]),
                prompt_logprobs=0 if scored else None,
                prompt_logprobs_start=chance.randrange(len(prompt)) if scored else 0,
            )
        rig.step(accept=chance.randrange(5))
        if number % 3 == 0 and rig.scheduler.waiting:
            rig.scheduler.remove(chance.choice(rig.scheduler.waiting))
        if number % 4 == 0 and rig.scheduler.running:
            rig.scheduler.remove(chance.choice(rig.scheduler.running), keep=chance.random() < 0.7)
        if number % 7 == 0:
            rig.cache.clear()
    for _ in range(2000):
        if not rig.running and not rig.waiting:
            break
        rig.step(accept=chance.randrange(5))
    assert not rig.running
    assert not rig.waiting
    rig.scheduler.check()
    rig.cache.clear()
    assert rig.pool.num_free == rig.pool.num_pages


def test_only_prompt_tokens_that_may_be_found_count_as_looked_up():
    rig = Rig(cache=False)
    rig.add("a", LONG)
    rig.step()
    assert rig.scheduler.num_queried == 0  # there is no cache to look into
    rig = Rig()
    rig.add("scored", LONG, prompt_logprobs=1)
    rig.step()
    assert rig.scheduler.num_queried == 0  # every position is computed
    rig.add("late", LONG, prompt_logprobs=1, prompt_logprobs_start=21)
    rig.step()
    assert rig.scheduler.num_queried == 20
    rig.add("plain", LONG)
    rig.step()
    assert rig.scheduler.num_queried == 20 + 40


def many(rig: Rig, count: int) -> None:
    """That many requests that decode, in pages taken ahead."""
    for i in range(count):
        rig.add(f"old{i}", 1, max_tokens=400)
    for _ in range(MOST_GATHERING + 2):
        rig.step()
    assert len(rig.scheduler.running) == count


def steps_until(rig: Rig, name: str) -> int:
    """Steps that somebody waits before it starts."""
    for waited in range(20):
        if name in rig.step():
            return waited
    raise AssertionError(f"{name} never started")


@pytest.mark.parametrize(
    ("running", "behind", "most"),
    [
        (1, True, 0),
        (30, True, 0),
        (32, True, 1),
        (96, True, 3),
        (400, True, MOST_GATHERING),
        (96, False, 0),
    ],
)
def test_prompts_that_run_by_themselves_wait_for_others(
    running: int, behind: bool, most: int
) -> None:
    """So many steps since the last ones at most; where they run with the rest, none."""
    rig = Rig(80_000, max_num_reqs=running + 8, max_queue=running + 8)
    rig.scheduler.lookahead = 8 if behind else 0
    many(rig, running)
    rig.add("a", 5)
    assert steps_until(rig, "a") == 0  # the last prompts are long ago
    rig.add("b", 5)
    rig.add("c", 5)
    assert steps_until(rig, "b") == most
    assert rig.scheduler.waiting == []  # both of them at once


def test_nobody_waits_where_prompts_run_anyway() -> None:
    rig = Rig(20_000, max_num_reqs=80, prefill_chunk=8)
    rig.scheduler.lookahead = 8
    many(rig, 64)
    rig.add("long", 40)
    assert steps_until(rig, "long") == 0
    rig.add("short", 5)
    assert steps_until(rig, "short") == 0


def test_who_waits_for_others_never_waits_for_those_who_have_gone() -> None:
    rig = Rig(20_000, max_num_reqs=80)
    rig.scheduler.lookahead = 8
    many(rig, 64)
    rig.add("a", 5, max_tokens=1)
    assert steps_until(rig, "a") == 0
    rig.add("b", 5)
    for state in list(rig.scheduler.running):
        rig.scheduler.remove(state)
    assert steps_until(rig, "b") == 0
