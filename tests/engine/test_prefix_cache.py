"""Whole engines with shared prefixes, over doubles whose KV is token ids: a wrong page is heard."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import permutations

import pytest
import torch

from emberline.drafters.base import Drafter
from emberline.drafters.ngram import NGramDrafter
from emberline.engine.engine import Engine
from emberline.types import (
    TIMED_OUT,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
)
from emberline.verify.planner import Planner, Threshold, VerifyAll

from support.deferred import overlapped
from support.doubles import ScriptedPlanner
from support.engines import Answer, ask, collect, make_engine, run
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget

PAGE = 4
PROMPT = [(7 * i + 3) % 31 for i in range(18)]


def greedy(count: int = 12, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)  # type: ignore[arg-type]


def pages_below(num_tokens: int) -> int:
    """Tokens of the full pages of a prompt of which one token must be left."""
    return (num_tokens - 1) // PAGE * PAGE


def same(one: Answer, other: Answer) -> bool:
    """The same tokens and bit for bit the same log-probabilities."""
    return (one.token_ids, one.logprobs, one.last.finish_reason) == (
        other.token_ids,
        other.logprobs,
        other.last.finish_reason,
    )


@cache
def solo(prompt: tuple[int, ...], count: int, **options: int) -> Answer:
    """What a greedy request says by itself, with nothing cached and no drafts."""
    engine = make_engine(PrefixTarget(), prefix_cache=False)
    return ask(engine, prompt, greedy(count, **options))


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """Other tests count what is alive."""
    yield
    solo.cache_clear()
    mixed_alone.cache_clear()


DRAFTERS: dict[str, Callable[[PrefixTarget], Drafter | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: NGramDrafter(4),
    "perfect": lambda target: PrefixDrafter(target, 6),
    "mixed": lambda target: PrefixDrafter(target, 6, wrong_every=3, doubt_every=4),
    "ahead": lambda target: PrefixDrafter(target, 5, wrong_every=4, lookahead=1),
}
PLANNERS: dict[str, Callable[[], Planner]] = {
    "all": VerifyAll,
    "threshold": lambda: Threshold(0.5),
    "scripted": lambda: ScriptedPlanner(lambda ids, sure: (3 * ids[0] + ids[-1]) % 7),
}
drafting = pytest.mark.parametrize("name", DRAFTERS)


@drafting
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17, 18])
def test_a_prompt_that_comes_again_is_taken_from_the_cache(name, length):
    target = PrefixTarget()
    engine = make_engine(target, DRAFTERS[name](target))
    prompt, params = PROMPT[:length], greedy(logprobs=3)
    first, second = ask(engine, prompt, params), ask(engine, prompt, params)
    assert first.last.num_cached_tokens == 0
    assert second.last.num_cached_tokens == pages_below(length)
    assert same(first, second)
    assert first.token_ids == target.greedy(prompt, 12)


@drafting
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_next_turn_finds_the_answer_too(name, count):
    target = PrefixTarget()
    engine = make_engine(target, DRAFTERS[name](target))
    answer = ask(engine, PROMPT, greedy(count))
    turn = [*PROMPT, *answer.token_ids, 4, 8, 15, 16, 23]
    # The last token of an answer was never computed.
    kept = (len(PROMPT) + count - 1) // PAGE * PAGE
    second = ask(engine, turn, greedy(logprobs=2))
    assert second.last.num_cached_tokens == kept
    assert same(second, solo(tuple(turn), 12, logprobs=2))


EDGES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17]


@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("chunk", [3, 512])
def test_prompt_scores_take_from_the_cache_what_needs_no_logits(start, chunk):
    """A41: the token at `start` is scored by the logits before it, so those must be computed."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, prompt_logprobs_start=start)
    expected = ask(make_engine(PrefixTarget()), PROMPT, params)
    engine = make_engine(PrefixTarget(), prefill_chunk=chunk)
    ask(engine, PROMPT, greedy())
    got = ask(engine, PROMPT, params)
    assert got.last.num_cached_tokens == max(start - 1, 0) // PAGE * PAGE
    assert got.last.prompt_logprobs == expected.last.prompt_logprobs
    assert [r is None for r in got.last.prompt_logprobs] == [p < max(start, 1) for p in range(18)]
    # What was scored is cached like any other prompt.
    assert ask(engine, PROMPT, greedy()).last.num_cached_tokens == 16


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_prompt_scores_do_not_depend_on_the_order_of_requests(order, together):
    """D17: A then AB, AB then A, ..."""
    prompts = [PROMPT[:6], PROMPT[:13], PROMPT, [*PROMPT[:11], 9, 9, 9, 9, 9]]
    params = greedy(3, prompt_logprobs=2, logprobs=1)
    alone = [solo(tuple(prompt), 3, prompt_logprobs=2, logprobs=1) for prompt in prompts]
    engine = make_engine(PrefixTarget(), prefill_chunk=5)
    requests = [Request(str(i), tuple(prompts[i]), params) for i in order]
    answers: dict[str, Answer] = {}
    for group in [requests] if together else [[request] for request in requests]:
        answers |= run(engine, group)
    for i, expected in enumerate(alone):
        assert same(answers[str(i)], expected)
        assert answers[str(i)].outputs[0].prompt_logprobs == expected.outputs[0].prompt_logprobs


@drafting
@pytest.mark.parametrize("planner", ["all", "scripted"])
@pytest.mark.parametrize("shared", [3, 4, 8, 13, 18])
def test_a_then_b_then_a_again(name, planner, shared):
    """C41: what B does with the prefix that it shares leaves A's as it was."""
    target = PrefixTarget()
    engine = make_engine(target, DRAFTERS[name](target), planner=PLANNERS[planner]())
    other = [*PROMPT[:shared], 30, 29, 28, 27, 26]
    params = greedy(20, logprobs=2)
    first, between, again = (ask(engine, p, params) for p in (PROMPT, other, PROMPT))
    assert same(first, again)
    assert same(between, solo(tuple(other), 20, logprobs=2))
    assert again.last.num_cached_tokens == 16


@pytest.mark.parametrize("name", [n for n in DRAFTERS if n != "ahead"])
def test_drafting_does_not_change_what_is_found(name):
    """C42: a drafter's KV comes back with the target's, from the same pages."""

    def hits(drafter: str) -> list[int]:
        target = PrefixTarget()
        engine = make_engine(target, DRAFTERS[drafter](target))
        found = []
        for length in (18, 18, 9, 16, 17):
            found.append(ask(engine, PROMPT[:length], greedy()).last.num_cached_tokens)
        turn = [*PROMPT, *target.greedy(PROMPT, 12), 5, 5]
        return [*found, ask(engine, turn, greedy()).last.num_cached_tokens]

    assert hits(name) == hits("none") == [0, 16, 8, 12, 16, 28]


def test_draft_kv_that_looks_ahead_is_not_taken_where_the_next_token_differs():
    """`PrefixDrafter` fails on draft KV that saw another token than the one that follows."""
    target = PrefixTarget()
    engine = make_engine(target, PrefixDrafter(target, 5, lookahead=1))
    stem = PROMPT[:8]
    ask(engine, [*stem, 1], greedy())
    for prompt, cached in (
        ([*stem, 2], 4),
        ([*stem, 2, 3, 4, 5, 6], 8),
        ([*stem, 1, 3], 8),
        ([*stem, 2, 3, 4, 5, 9], 8),
    ):
        answer = ask(engine, prompt, greedy())
        assert answer.last.num_cached_tokens == cached
        assert answer.token_ids == target.greedy(prompt, 12)


def script(engine: Engine, chance: random.Random) -> None:
    """Twelve events: requests of two stems come, are cancelled within a step or two, come again."""
    stems = [PROMPT[:9], [*PROMPT[:5], 1, 2, 3, 4]]
    requests: dict[str, Request] = {}
    answers: dict[str, Answer] = {}

    def advance(steps: int) -> None:
        for _ in range(steps):
            for output in engine.step():
                collect(answers[output.request_id], output)

    for number in range(12):
        count = chance.choice([2, 7, 16])
        prompt = (*chance.choice(stems), *chance.choice([(1, 2, 3), (4,), (9, 9, 9, 9, 9)]))
        unfinished = [k for k, a in answers.items() if not a.outputs or not a.last.finished]
        if number % 3 == 2 and unfinished:
            key = chance.choice(unfinished)
            engine.abort(key)
            advance(chance.randrange(2))
            prompt, count = requests[key].prompt_token_ids, requests[key].params.max_tokens
        request = Request(f"e{number}", prompt, greedy(count, logprobs=1))
        engine.add(request)
        requests[request.request_id], answers[request.request_id] = request, Answer()
        advance(chance.randrange(3))
    while engine.has_work:
        advance(1)
    for key, request in requests.items():
        expected = solo(request.prompt_token_ids, request.params.max_tokens, logprobs=1)
        if answers[key].last.finish_reason is FinishReason.ABORT:
            assert answers[key].token_ids == expected.token_ids[: len(answers[key].token_ids)]
        else:
            assert same(answers[key], expected)


@pytest.mark.parametrize("name", ["ngram", "mixed", "ahead"])
def test_cancelled_and_repeated_requests_leave_others_alone(name):
    """C39: 20 scripts of 12 events, on one engine without rest and a small pool."""
    target = PrefixTarget()
    engine = make_engine(target, DRAFTERS[name](target), num_pages=24, prefill_chunk=4)
    for seed in range(20):
        script(engine, random.Random(seed))


def mixed() -> list[Request]:
    """14 requests of three stems, greedy and seeded, of mixed lengths and priorities."""
    stems = [PROMPT, PROMPT[:9], []]
    return [
        Request(
            f"r{i}",
            (*stems[i % 3], *((3 * i + 11 * j) % 31 for j in range(1 + 5 * i % 13))),
            SamplingParams(
                temperature=(0.0, 0.8)[i % 2],
                seed=i,
                max_tokens=5 + 7 * i % 30,
                logprobs=2,
                ignore_eos=True,
            ),
            priority=(0, 1, -1, 0)[i % 4],
        )
        for i in range(14)
    ]


@cache
def mixed_alone() -> dict[str, Answer]:
    """What the requests of `mixed` say one by one, without cache and drafts."""
    engine = make_engine(PrefixTarget(scale=1.0), prefix_cache=False)
    return {r.request_id: run(engine, [r])[r.request_id] for r in mixed()}


@drafting
@pytest.mark.parametrize("planner", PLANNERS)
def test_preemption_among_priorities_and_drafts_changes_nothing(name, planner):
    """C36, C38: who gives way comes back without the drafts it had, and goes on as if alone."""
    target = PrefixTarget(scale=1.0)
    engine = make_engine(
        target,
        DRAFTERS[name](target),
        planner=PLANNERS[planner](),
        num_pages=16,  # about one and a half of the longest
        prefill_chunk=6,
    )
    got = run(engine, mixed())
    assert engine.snapshot().num_preemptions > 0
    assert all(same(got[key], expected) for key, expected in mixed_alone().items())


@pytest.mark.parametrize("layout", ["static", "compact"])
def test_a_long_prompt_runs_in_chunks_beside_requests_that_speculate(layout):
    """C43."""
    target = PrefixTarget()
    drafter = PrefixDrafter(target, 6, wrong_every=4)
    engine = make_engine(target, drafter, layout=layout, prefill_chunk=16)
    requests = [Request(f"r{i}", tuple(PROMPT[: 3 + i]), greedy(40)) for i in range(4)]
    long = Request("long", tuple((5 * i) % 31 for i in range(100)), greedy(8))
    answers = {request.request_id: Answer() for request in [*requests, long]}
    for request in requests:
        engine.add(request)
    for number in range(200):
        for output in engine.step() if engine.has_work else ():
            collect(answers[output.request_id], output)
        if number == 2:
            engine.add(long)
    assert not engine.has_work
    for request in [*requests, long]:
        expected = target.greedy(list(request.prompt_token_ids), request.params.max_tokens)
        assert answers[request.request_id].token_ids == expected


@drafting
def test_a_drafter_leaves_chunking_on(name):
    """C54."""
    target = PrefixTarget()
    engine = make_engine(target, DRAFTERS[name](target), prefill_chunk=16)
    ask(engine, [(5 * i) % 31 for i in range(100)], greedy(1))
    assert target.num_tokens_run == [16] * 6 + [4]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", ["none", "mixed", "ahead"])
def test_two_hundred_requests_of_any_kind_give_back_every_page(name, prefix_cache):
    """D22: random lengths, caps, stops and aborts; `run` sees that nothing is held at the end."""
    chance = random.Random(7)
    target = PrefixTarget()
    engine = make_engine(
        target,
        DRAFTERS[name](target),
        planner=Threshold(0.5),
        num_pages=40,
        prefix_cache=prefix_cache,
        max_queue=300,
    )
    requests = [
        Request(
            f"r{i}",
            (*PROMPT[: chance.randrange(19)], *chance.choices(range(31), k=1 + i % 9)),
            SamplingParams(
                temperature=0,
                max_tokens=chance.randint(1, 24),
                stop_token_ids=chance.choices(range(31), k=i % 3),
                prompt_logprobs=chance.choice([None, None, 1]),
            ),
        )
        for i in range(200)
    ]
    answers = run(engine, requests, between=lambda _: engine.abort(f"r{chance.randrange(200)}"))
    reasons = {answer.last.finish_reason for answer in answers.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    snapshot = engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.kv_usage) == (0, 0, 0)
    assert (snapshot.num_cached_pages_share > 0.5) == prefix_cache
    engine.clear_prefix_cache()
    assert engine.snapshot().num_cached_pages_share == 0
    # All of it can be used at once: a prompt that needs every page still runs.
    whole = tuple(i % 31 for i in range(159 - 40))
    assert len(run(engine, [Request("w", whole, greedy(9))])["w"].token_ids) == 9


def test_choices_of_one_prompt_share_its_prefill():
    target = PrefixTarget(scale=1.0)
    engine = make_engine(target, prefill_chunk=8)
    params = SamplingParams(temperature=1, seed=5, max_tokens=6, logprobs=1, ignore_eos=True)
    requests = [Request(f"c{i}", tuple(PROMPT), params, choice=i) for i in range(6)]
    answers = run(engine, requests)
    # 18 tokens once, 2 for each other choice; then 5 steps of one token a choice.
    assert sum(target.num_tokens_run) == 18 + 5 * 2 + 6 * 5
    assert [answers[f"c{i}"].last.num_cached_tokens for i in range(6)] == [0, 16, 16, 16, 16, 16]
    assert engine.snapshot().prefix_query_tokens == 6 * 18
    assert engine.snapshot().prefix_hit_tokens == 5 * 16
    assert len({tuple(a.token_ids) for a in answers.values()}) > 3
    for request in requests:
        alone = run(make_engine(PrefixTarget(scale=1.0)), [request])[request.request_id]
        assert same(answers[request.request_id], alone)


@drafting
def test_the_cache_changes_no_answer(name):
    target = PrefixTarget(scale=1.0)
    engine = make_engine(target, DRAFTERS[name](target))
    for _ in range(2):
        got = run(engine, mixed())
        assert all(same(got[key], expected) for key, expected in mixed_alone().items())
    assert engine.snapshot().prefix_hit_tokens > 0
    assert all(a.last.num_cached_tokens == 0 for a in mixed_alone().values())


def test_without_a_cache_nothing_is_kept():
    engine = make_engine(PrefixTarget(), prefix_cache=False)
    for _ in range(2):
        assert ask(engine, PROMPT, greedy()).last.num_cached_tokens == 0
    assert engine.snapshot().num_cached_pages_share == 0


def test_clear_prefix_cache_forgets_what_nobody_runs():
    engine = make_engine(PrefixTarget())
    ask(engine, PROMPT, greedy())
    engine.clear_prefix_cache()
    assert engine.snapshot().num_cached_pages_share == 0
    assert ask(engine, PROMPT, greedy()).last.num_cached_tokens == 0
    requests = [Request("runs", tuple(PROMPT), greedy(20)), Request("r", (*PROMPT, 5), greedy(2))]

    def between(number: int) -> None:
        if number == 0:
            engine.clear_prefix_cache()  # what a request holds stays

    answers = run(engine, requests, between=between)
    assert [answers[key].last.num_cached_tokens for key in ("runs", "r")] == [16, 16]


# What went wrong is not kept.

NAN = torch.full((32,), torch.nan)


@pytest.mark.parametrize("chunk", [4, 512])
def test_a_prompt_that_broke_leaves_nothing_in_the_cache(chunk):
    target = PrefixTarget()
    engine = make_engine(target, prefill_chunk=chunk)
    target.overrides[tuple(PROMPT)] = NAN
    assert ask(engine, PROMPT, greedy()).last.finish_reason is FinishReason.ERROR
    assert engine.snapshot().num_cached_pages_share == 0
    del target.overrides[tuple(PROMPT)]
    answer = ask(engine, PROMPT, greedy())
    assert answer.last.num_cached_tokens == 0
    assert answer.token_ids == target.greedy(PROMPT, 12)


@pytest.mark.parametrize("chunk", [5, 15, 512])
def test_a_prompt_that_is_only_scored_is_found_broken_too(chunk):
    """Whatever its chunks are: logits of its last token score nothing, but its page may be kept."""
    target = PrefixTarget()
    engine = make_engine(target, prefill_chunk=chunk)
    target.overrides[tuple(PROMPT[:16])] = NAN
    answer = ask(engine, PROMPT[:16], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert answer.last.finish_reason is FinishReason.ERROR
    # Pages before the one with the broken token may have been found sound by a step of their own.
    assert ask(engine, PROMPT, greedy()).last.num_cached_tokens in (0, 12)


def test_an_answer_that_broke_keeps_its_prompt_only():
    target = PrefixTarget()
    path = target.greedy(PROMPT, 12)
    engine = make_engine(target, PrefixDrafter(target, 3))
    target.overrides[(*PROMPT, *path[:9])] = NAN
    broken = ask(engine, PROMPT, greedy())
    assert broken.last.finish_reason is FinishReason.ERROR
    assert len(broken.token_ids) >= 6
    target.overrides.clear()
    answer = ask(engine, [*PROMPT, *path[:8]], greedy(4))
    assert answer.last.num_cached_tokens == 16
    assert answer.token_ids == path[8:]


@pytest.mark.parametrize("behind", [False, True])
def test_a_first_token_that_broke_is_not_kept_with_the_prompt(behind):
    """Its step is on its way by the time that the prompt is kept: what it says is not known yet."""
    target, prompt = PrefixTarget(), [*PROMPT, 2]
    [first] = target.greedy(prompt, 1)
    engine = make_engine(target)
    if behind:
        overlapped(engine)
    target.overrides[(*prompt, first)] = NAN
    assert (len(prompt) + 1) % PAGE == 0
    assert ask(engine, prompt, greedy()).last.finish_reason is FinishReason.ERROR
    target.overrides.clear()
    assert ask(engine, [*prompt, first, 3], greedy()).last.num_cached_tokens == 16


@pytest.mark.parametrize("broken_at", [0, 1, 5])
def test_one_that_breaks_does_not_disturb_those_that_share_its_prefix(broken_at):
    target = PrefixTarget()
    others = {
        "same": PROMPT[:-1],
        "longer": [*PROMPT[:17], 1, 2, 3, 4, 5, 6],
        "half": [*PROMPT[:9], 8, 8, 8],
    }
    expected = {key: target.greedy(prompt, 12) for key, prompt in others.items()}
    path = target.greedy(PROMPT, 12)
    target.overrides[(*PROMPT, *path[:broken_at])] = NAN
    engine = make_engine(target, PrefixDrafter(target, 4, wrong_every=3), prefill_chunk=5)
    requests = [Request("nan", tuple(PROMPT), greedy())]
    requests += [Request(key, tuple(prompt), greedy()) for key, prompt in others.items()]
    answers = run(engine, requests)
    assert answers["nan"].last.finish_reason is FinishReason.ERROR
    assert {key: answers[key].token_ids for key in others} == expected


# Deadlines.


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_ends_what_runs_and_what_waits_with_what_they_have():
    clock, target = Clock(), PrefixTarget()
    engine = make_engine(target, PrefixDrafter(target, 2), clock=clock, max_num_reqs=2)
    engine.add(Request("runs", tuple(PROMPT), greedy(60, logprobs=1), timeout=3.0))
    engine.add(Request("free", tuple(PROMPT[1:]), greedy(60)))
    engine.add(Request("waits", tuple(PROMPT[2:]), greedy(60), timeout=2.5))
    engine.add(Request("later", tuple(PROMPT[3:]), greedy(5), timeout=1000.0))
    answers = {key: Answer() for key in ("runs", "free", "waits", "later")}
    ended: dict[str, float] = {}
    while engine.has_work:
        for output in engine.step():
            collect(answers[output.request_id], output)
            if output.finished:
                ended[output.request_id] = clock.now
        clock.now += 0.5
    assert (ended["waits"], ended["runs"]) == (102.5, 103.0)
    for key in ("runs", "waits"):
        last = answers[key].last
        assert (last.finish_reason, last.stop_reason) == (FinishReason.ABORT, TIMED_OUT)
    assert answers["waits"].token_ids == []
    num_had = len(answers["runs"].token_ids)
    assert 0 < num_had < 60
    assert answers["runs"].token_ids == target.greedy(PROMPT, num_had)
    assert len(answers["runs"].logprobs) == num_had
    for key, prompt, count in (("free", PROMPT[1:], 60), ("later", PROMPT[3:], 5)):
        assert answers[key].last.finish_reason is FinishReason.LENGTH
        assert answers[key].token_ids == target.greedy(prompt, count)
    # What was computed until then is there for the next try.
    again = ask(engine, [*PROMPT, *answers["runs"].token_ids], greedy(3))
    assert again.last.num_cached_tokens == (len(PROMPT) + num_had - 1) // PAGE * PAGE


def test_a_deadline_in_the_middle_of_a_prompt():
    clock = Clock()
    engine = make_engine(PrefixTarget(), clock=clock, prefill_chunk=4)
    engine.add(Request("r", tuple(PROMPT), SamplingParams(prompt_logprobs=1), timeout=1.0))
    assert engine.step() == []
    clock.now += 1.0
    (output,) = engine.step()
    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, TIMED_OUT)
    assert (output.token_ids, output.prompt_logprobs) == ((), None)
    assert not engine.has_work
    assert engine.snapshot().kv_usage == 0


# Sliding windows: `PrefixTarget` fails where a page inside its window is missing.

windows = pytest.mark.parametrize("window", [3, 5, 13])


@windows
@drafting
def test_a_long_answer_needs_no_more_pages_than_its_window(window, name):
    target = PrefixTarget(window=window, max_model_len=512)
    engine = make_engine(target, DRAFTERS[name](target), num_pages=9, prefill_chunk=8)
    prompt = [(5 * i) % 31 for i in range(60)]
    answer = ask(engine, prompt, greedy(120))
    assert answer.token_ids == target.greedy(prompt, 120)
    assert engine.snapshot().num_preemptions == 0


def test_a_window_that_does_not_fit_bounds_the_length_again():
    engine = make_engine(PrefixTarget(window=24, max_model_len=512), num_pages=6, prefill_chunk=8)
    with pytest.raises(InvalidRequest, match="KV cache of 24"):
        engine.add(Request("r", tuple(PROMPT), greedy(7)))
    answer = ask(engine, PROMPT, greedy(6))
    assert len(answer.token_ids) == 6


@windows
@drafting
def test_answers_ignore_the_window_of_the_cache(window, name):
    target = PrefixTarget(scale=1.0, window=window)
    engine = make_engine(target, DRAFTERS[name](target), num_pages=18, prefill_chunk=6)
    for _ in range(2):
        got = run(engine, mixed())
        assert all(same(got[key], expected) for key, expected in mixed_alone().items())


@pytest.mark.parametrize("name", ["none", "mixed", "ahead"])
@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_a_window_is_found_again_wherever_a_prompt_or_an_answer_ends(window, chunk, name):
    """What is let go lies behind the prefix that can match, not behind the last token."""
    lookahead = int(name == "ahead")
    for length in range(11, 19):
        target = PrefixTarget(window=window)
        engine = make_engine(target, DRAFTERS[name](target), prefill_chunk=chunk)
        prompt = PROMPT[:length]
        first, second = ask(engine, prompt, greedy(6)), ask(engine, prompt, greedy(6))
        assert second.last.num_cached_tokens == pages_below(length)
        assert first.token_ids == second.token_ids == target.greedy(prompt, 6)
        turn = [*prompt, *first.token_ids, 4, 8, 15]
        third = ask(engine, turn, greedy())
        # The answer's last token has KV only if it was a draft.
        least, most = (length + count - lookahead for count in (5, 6))
        assert least // PAGE <= third.last.num_cached_tokens // PAGE <= most // PAGE
        assert third.token_ids == target.greedy(turn, 12)


def test_pages_behind_the_window_serve_others():
    target = PrefixTarget(window=8, max_model_len=512)
    engine = make_engine(target, num_pages=12, prefill_chunk=8)
    requests = [
        Request(f"r{i}", tuple((7 * j + i) % 31 for j in range(40)), greedy(40)) for i in range(3)
    ]
    answers = run(engine, requests)  # 20 pages each, if none were given back
    assert engine.snapshot().num_preemptions == 0
    for request in requests:
        expected = target.greedy(list(request.prompt_token_ids), 40)
        assert answers[request.request_id].token_ids == expected


def test_a_drafter_that_sees_all_keeps_all():
    """The pages are of target and drafter: one that looks back without end bounds the window."""
    target = PrefixTarget(window=8)

    class Whole(ConstantDrafter):
        kv_spec = PrefixTarget().kv_spec

    engine = make_engine(target, Whole(), num_pages=9, prefill_chunk=8)
    with pytest.raises(InvalidRequest, match="KV cache of 36"):
        engine.add(Request("r", tuple(PROMPT), greedy(20)))
