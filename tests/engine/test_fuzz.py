"""Five hundred random requests: whatever meets whatever, each ends once, as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from emberline.drafters.base import Drafter
from emberline.drafters.ngram import NGramDrafter
from emberline.types import FinishReason, Request, SamplingParams
from emberline.verify.planner import CausalGreedy, LaggedTopK, Planner, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts

from support.deferred import overlapped
from support.doubles import ScriptedPlanner
from support.engines import Answer, Letters, collect, make_engine
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget

VOCAB = 24
NUM_PAGES = 14  # the longest request fills them
STEMS = [[(7 * i + 3) % VOCAB for i in range(21)], [(5 * i + 2) % VOCAB for i in range(12)], []]
# Verifying pays at first and then no more, so that the planners by cost trim.
COSTS = StepCosts(
    target=((1, 1, 1.0), (1, 4, 1.1), (1, 8, 2.0), (6, 6, 1.5), (6, 20, 2.0), (6, 40, 6.0)),
    draft=((1, 4, 0.05), (6, 4, 0.1)),
)

DRAFTERS: dict[str, Callable[[PrefixTarget], Drafter | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: NGramDrafter(4),
    "noisy": lambda target: PrefixDrafter(target, 5, noise=2.0, doubt_every=4),
    "ahead": lambda target: PrefixDrafter(target, 7, wrong_every=3, lookahead=1),
    "constant": lambda target: ConstantDrafter(5, 3),
}
PLANNERS: dict[str, Callable[[random.Random], Planner]] = {
    "all": lambda chance: VerifyAll(),
    "threshold": lambda chance: Threshold(0.5),
    "scripted": lambda chance: ScriptedPlanner(lambda ids, sure: chance.randrange(len(ids) + 1)),
    "greedy": lambda chance: CausalGreedy(COSTS),
    "lagged": lambda chance: LaggedTopK(COSTS),
}


def any_params(chance: random.Random, num_prompt: int) -> SamplingParams:
    """Options in any combination that means something."""
    options: dict[str, object] = {
        "temperature": chance.choice([0.0, 0.0, 0.7, 1.2]),
        "seed": chance.randrange(1000),
        "max_tokens": chance.choice([1, 2, 9, 20, 26, 26]),
        "ignore_eos": chance.random() < 0.8,
    }
    if chance.random() < 0.5:
        options |= {"logprobs": chance.choice([0, 3])}
        options |= {"logprobs_mode": chance.choice(["raw", "processed"])}
        options |= {"logprob_token_ids": chance.choice([(), (2, 9)])}
    if chance.random() < 0.3:
        options |= {"prompt_logprobs": chance.choice([0, 2])}
        options |= {"prompt_logprobs_start": chance.choice([0, chance.randrange(num_prompt)])}
        options |= {"max_tokens": chance.choice([0, options["max_tokens"]])}
    for name, value in (
        ("frequency_penalty", 0.8),
        ("presence_penalty", -0.7),
        ("repetition_penalty", 1.3),
        ("top_k", 6),
        ("top_p", 0.8),
        ("min_p", 0.05),
        ("logit_bias", {3: 2.0, 7: -100.0}),
        ("stop_token_ids", (chance.randrange(VOCAB), chance.randrange(VOCAB))),
        ("stop", [chr(97 + chance.randrange(VOCAB)) + chr(97 + chance.randrange(VOCAB)), "ab"]),
        ("min_tokens", min(4, options["max_tokens"])),  # type: ignore[call-overload]
        ("speculate", False),
        ("accept", "rejection"),
    ):
        if chance.random() < 0.12:
            options[name] = value
    return SamplingParams(**options)  # type: ignore[arg-type]


def any_request(chance: random.Random, name: str) -> Request:
    stem = chance.choice(STEMS)
    tail = chance.choices(range(VOCAB), k=chance.randint(1, 9))
    prompt = (*stem[: chance.randrange(len(stem) + 1)], *tail)
    return Request(
        name,
        prompt,
        any_params(chance, len(prompt)),
        choice=chance.randrange(3),
        priority=chance.choice([0, 0, 0, 1, -1]),
        timeout=chance.choice([*[None] * 8, 4.0, 30.0]),
        stream=chance.random() < 0.7,
    )


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def alone(request: Request, target: PrefixTarget) -> Answer:
    """What a request says in an engine of its own, without drafts, cache and hurry."""
    engine = make_engine(target, num_pages=NUM_PAGES, prefix_cache=False, clock=Clock())
    engine.add(request, Letters(request.params))
    answer = Answer()
    while engine.has_work:
        for output in engine.step():
            collect(answer, output)
    return answer


def check_end(request: Request, got: Answer, expected: Answer) -> None:
    """It ended once (`collect` sees to that), with all that it says alone or the first part."""
    assert got.last.finished
    count = len(got.token_ids)
    assert len(got.logprobs) == (count if request.params.logprobs is not None else 0)
    if not (request.params.greedy or request.params.coupled):
        return  # its draws are those of the drafts that it met
    ended = got.last.finish_reason
    if ended is FinishReason.ERROR:  # a block is lost with the token that could not be drawn
        assert expected.last.finish_reason is ended
    elif ended is not FinishReason.ABORT:
        assert expected.last.finish_reason is ended
        assert got.last.stop_reason == expected.last.stop_reason
        assert (count, got.text) == (len(expected.token_ids), expected.text)
    assert got.token_ids == expected.token_ids[:count]
    assert got.logprobs == expected.logprobs[:count]
    assert expected.text.startswith(got.text)
    scores = [o.prompt_logprobs for o in got.outputs if o.prompt_logprobs is not None]
    wanted = [o.prompt_logprobs for o in expected.outputs if o.prompt_logprobs is not None]
    assert scores == wanted or (ended is FinishReason.ABORT and not scores)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("steps", ["waited for", "overlapped"])
def test_twenty_requests_of_any_kind_end_as_if_alone(steps, planner, drafter):
    """25 times 20, twice: also C36, C38, C39, D22."""
    chance = random.Random(f"{planner} {drafter}")
    window = chance.choice([None, None, 9])
    target = PrefixTarget(VOCAB, scale=1.5, window=window)
    clock = Clock()
    engine = make_engine(
        target,
        DRAFTERS[drafter](target),
        planner=PLANNERS[planner](chance),
        layout=chance.choice(["static", "compact"]),
        # With room to spare, whoever runs behind the host gets pages for steps to come.
        num_pages=NUM_PAGES if steps == "waited for" or drafter == "noisy" else 20 * NUM_PAGES,
        clock=clock,
        prefill_chunk=chance.choice([3, 8, 64]),
        max_num_reqs=chance.choice([4, 8]),
        max_num_tokens=chance.choice([8, 64]),
        max_verify_tokens=chance.choice([5, 1024]),
    )
    if steps == "overlapped":
        overlapped(engine)
    requests = {f"r{i}": any_request(chance, f"r{i}") for i in range(20)}
    broken = requests["r7"]  # the model says NaN after its first few tokens
    path = alone(broken, target).token_ids
    cut = chance.randrange(len(path) + 1)
    target.overrides[(*broken.prompt_token_ids, *path[:cut])] = torch.full((VOCAB,), torch.nan)

    to_come = list(requests.values())
    answers: dict[str, Answer] = {}
    for _ in range(3000):
        for _ in range(chance.choice([0, 0, 1, 3])):
            if to_come:
                request = to_come.pop()
                answers[request.request_id] = Answer()
                engine.add(request, Letters(request.params))
        if answers and chance.random() < 0.04:
            engine.abort(chance.choice(list(answers)))
        if chance.random() < 0.02:
            engine.clear_prefix_cache()
        for output in engine.step():
            collect(answers[output.request_id], output)
        engine._scheduler.check()
        clock.now += 1.0
        if not engine.has_work and not to_come:
            break
    assert not engine.has_work
    for key, request in requests.items():
        check_end(request, answers[key], alone(request, target))
    assert engine.snapshot().kv_usage == 0
    engine.clear_prefix_cache()
    assert engine.snapshot().num_cached_pages_share == 0


@pytest.mark.parametrize("planner", ["all", "threshold", "lagged"])
def test_order_and_batch_size_change_no_bit(planner):
    chance = random.Random(planner)
    target = PrefixTarget(VOCAB, scale=1.5)
    requests = [any_request(chance, f"r{i}") for i in range(50)]
    requests = [Request(r.request_id, r.prompt_token_ids, r.params, r.choice) for r in requests]
    expected = {request.request_id: alone(request, target) for request in requests}
    for max_num_reqs in (1, 2, 5, 16, 50):
        chance.shuffle(requests)
        engine = make_engine(
            target,
            PrefixDrafter(target, 6, wrong_every=4, doubt_every=5),
            planner=PLANNERS[planner](chance),
            num_pages=NUM_PAGES,
            max_num_reqs=max_num_reqs,
            max_num_tokens=chance.choice([50, 1024]),
            prefill_chunk=chance.choice([5, 512]),
        )
        answers = {request.request_id: Answer() for request in requests}
        for request in requests:
            engine.add(request, Letters(request.params))
        while engine.has_work:
            for output in engine.step():
                collect(answers[output.request_id], output)
        for request in requests:
            check_end(request, answers[request.request_id], expected[request.request_id])
