"""100,000 answers of three tokens from a whole engine whose planner trims hard: chi-square.

The enumerated law (test_law.py) takes one request at a time. Here 32 share every step, their
budgets and their slots, which pass from one request to the next.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from emberline.batch import Admission, DraftProposal, StepShape
from emberline.cache.page_pool import PagePool
from emberline.config import CacheConfig, EngineConfig, SchedulerConfig
from emberline.engine.engine import Engine
from emberline.engine.step import StepParts
from emberline.engine.trace import BlockTrace
from emberline.sampling.keys import KeyedDraws
from emberline.types import Request, SamplingParams
from emberline.verify.planner import CausalGreedy, LaggedTopK, Planner
from emberline.verify.step_cost import StepCosts

from support.doubles import Prefix, ScriptedDrafter, TableTarget, random_table
from support.statistics import LEAST_P, chi_square_p

PROMPT: Prefix = (2, 0)
NUM_REQS, NUM_ANSWERS, LENGTH, PAGE = 32, 100_000, 3, 16
TARGET, DRAFT = random_table(3, seed=5), random_table(3, seed=9, scale=1.5)

# Twelve drafts beside 32 anchors are cheap, more are not.
TRIMS = StepCosts(
    target=((NUM_REQS, 1, 1.0), (NUM_REQS, NUM_REQS + 12, 1.1), (NUM_REQS, NUM_REQS * 3, 9.0)),
    draft=(),
)


def confidence(prefix: Prefix) -> float:
    return (0.95, 0.35, 0.7)[(sum(prefix) + len(prefix)) % 3]


def sample(planner: Planner, count: int) -> tuple[Counter[Prefix], int, int]:
    """How often each answer came, the drafts drawn and the drafts verified."""
    num_pages = NUM_REQS * 2
    config = EngineConfig(
        cache=CacheConfig(page_size=PAGE, num_tokens=num_pages * PAGE),
        scheduler=SchedulerConfig(max_num_reqs=NUM_REQS, max_queue=2 * NUM_REQS),
    ).on("cpu")
    parts = StepParts(
        target=TableTarget(TARGET, 3, (num_pages + 1) * PAGE, PAGE),
        drafter=ScriptedDrafter(2, DRAFT, confidence=confidence),
        planner=planner,
        draws=KeyedDraws(),
        history=torch.zeros(NUM_REQS, PAGE, dtype=torch.int64),
        page_size=PAGE,
        layout="compact",
        eos_ids=frozenset(),
    )
    engine = Engine(parts, PagePool(num_pages + 1, PAGE), config)
    drawn = verified = 0

    def count_drafts(blocks: Sequence[BlockTrace]) -> None:
        nonlocal drawn, verified
        drawn += sum(len(block.confidence) for block in blocks)
        verified += sum(block.num_verified for block in blocks)

    engine.observer = count_drafts
    answers: dict[str, Prefix] = {}
    coming = iter(range(count))
    while True:
        for index in itertools.islice(coming, 2 * NUM_REQS - engine.num_requests):
            params = SamplingParams(max_tokens=LENGTH, seed=index, accept="rejection")
            engine.add(Request(str(index), PROMPT, params))
        if not engine.has_work:
            break
        for output in engine.step():
            answers[output.request_id] = answers.get(output.request_id, ()) + output.token_ids
    return Counter(answers.values()), drawn, verified


def expected() -> dict[Prefix, float]:
    law: dict[Prefix, float] = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*output, token): weight * prob
            for output, weight in law.items()
            for token, prob in enumerate(TARGET((*PROMPT, *output)).softmax(-1).tolist())
        }
    return law


def p_value(counts: Counter[Prefix]) -> float:
    law = expected()
    assert set(counts) <= set(law)
    return chi_square_p(
        torch.tensor([counts[output] for output in law]), torch.tensor(list(law.values()))
    )


@pytest.mark.parametrize("planner", [CausalGreedy, LaggedTopK])
def test_the_law_holds_where_verification_is_trimmed(
    planner: Callable[[StepCosts], Planner],
) -> None:
    counts, drawn, verified = sample(planner(TRIMS), NUM_ANSWERS)
    assert sum(counts.values()) == NUM_ANSWERS
    assert 0.1 < verified / drawn < 0.7, "the costs were meant to trim hard"
    p = p_value(counts)
    assert p > LEAST_P, f"chi-square p = {p:.2e}"


class Peeking(CausalGreedy):
    """Verifies a block up to its first token 2: its lengths look at the tokens they admit."""

    def admit(self, proposal: DraftProposal, shape: StepShape) -> Admission:
        self._outlook.learn(shape, None)
        lens = (proposal.token_ids != 2).long().cumprod(-1).sum(-1)
        lens = torch.minimum(lens, proposal.num_drafted)
        return Admission(lens, int(lens.sum()))


def test_the_test_can_fail() -> None:
    counts, _, _ = sample(Peeking(TRIMS), NUM_ANSWERS * 3 // 10)
    assert p_value(counts) < LEAST_P
