"""Predicted outputs in whole engines: fewer steps, the same answer, counters that add up."""

from __future__ import annotations

import random

import pytest

from emberline.drafters.base import Drafter
from emberline.engine.engine import Engine
from emberline.engine.prediction import WINDOW
from emberline.types import InvalidRequest, Origin, Request, SamplingParams
from emberline.verify.planner import CausalGreedy, LaggedTopK, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts

from support.engines import Answer, make_engine, run
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget

PROMPT = (5, 6, 7)
LENGTH = 80


def engine_with(drafts: str = "none", **options: object) -> Engine:
    target = PrefixTarget(vocab_size=64, max_model_len=128)
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "noisy": PrefixDrafter(target, num_drafts=5, noise=2.0),
        "constant": ConstantDrafter(3),
    }
    return make_engine(target, drafters[drafts], eos_ids=[], **options)  # type: ignore[arg-type]


def ask_for(engine: Engine, prediction: list[int], params: SamplingParams | None = None) -> Answer:
    params = params or SamplingParams(temperature=0, max_tokens=LENGTH)
    return run(engine, [Request("r", PROMPT, params, prediction=tuple(prediction))])["r"]


def changed(tokens: list[int], every: int, seed: int = 0) -> list[int]:
    """Every so-manieth token replaced by one, two or none."""
    rng = random.Random(seed)
    out: list[int] = []
    for i, token in enumerate(tokens):
        if i % every == every - 1:
            out += [(token + k + 1) % 64 for k in range(rng.randrange(3))]
        else:
            out.append(token)
    return out


@pytest.mark.parametrize("drafts", ["none", "noisy", "constant"])
@pytest.mark.parametrize("layout", ["static", "compact"])
@pytest.mark.parametrize("every", [1000, 20, 3])
def test_the_answer_is_the_same_and_the_counters_add_up(
    drafts: str, layout: str, every: int
) -> None:
    plain = ask_for(engine_with(), [])
    answer = ask_for(engine_with(drafts, layout=layout), changed(plain.token_ids, every))
    assert answer.token_ids == plain.token_ids
    stats = answer.last.stats
    assert stats.num_emitted == LENGTH - 1
    assert 0 < stats.num_predicted_accepted <= stats.num_predicted <= stats.num_verified
    assert stats.num_predicted_accepted <= stats.num_accepted
    assert sum(stats.verified_per_pos) == stats.num_verified
    assert sum(stats.accepted_per_pos) == stats.num_accepted
    if drafts == "none":
        assert (stats.num_predicted, stats.num_predicted_accepted) == (
            stats.num_verified,
            stats.num_accepted,
        )
    if every >= 20:
        assert stats.num_steps < LENGTH / 6


def test_a_right_prediction_takes_whole_windows() -> None:
    plain = ask_for(engine_with(), [])
    answer = ask_for(engine_with(), plain.token_ids)
    assert [len(output.token_ids) for output in answer.outputs] == [1, *[WINDOW] * 4, 15]


def test_a_wrong_prediction_costs_one_window_at_most() -> None:
    plain = ask_for(engine_with("noisy"), [])
    wrong = [(token + 1) % 64 for token in plain.token_ids]
    answer = ask_for(engine_with("noisy"), wrong)
    assert answer.token_ids == plain.token_ids
    assert answer.last.stats.num_steps <= plain.last.stats.num_steps + 2


@pytest.mark.parametrize("planner", ["verify all", "threshold", "causal greedy"])
def test_seeded_samples_do_not_know_the_prediction(planner: str) -> None:
    costs = StepCosts(target=((1, 1, 1.0), (1, 64, 2.0)), draft=((1, 1, 0.1),))
    planners = {
        "verify all": VerifyAll(),
        "threshold": Threshold(0.3),
        "causal greedy": CausalGreedy(costs),
    }
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=LENGTH, logprobs=1)
    plain = ask_for(engine_with(), [], params)
    engine = engine_with("noisy", planner=planners[planner])
    answer = ask_for(engine, changed(plain.token_ids, 11), params)
    assert answer.token_ids == plain.token_ids
    assert answer.logprobs == plain.logprobs
    assert answer.last.stats.num_predicted_accepted > 0


@pytest.mark.parametrize("planner", [CausalGreedy, LaggedTopK])
def test_a_prediction_is_not_charged_for_drafting(planner: type[CausalGreedy | LaggedTopK]) -> None:
    """Drafting is so dear that the drafter is never asked; what is predicted costs none of it."""
    costs = StepCosts(target=((1, 1, 1.0), (1, 8, 1.07)), draft=((1, 1, 4.0), (1, 7, 12.0)))
    plain = ask_for(engine_with(), [])
    answer = ask_for(engine_with("noisy", planner=planner(costs)), plain.token_ids)
    assert answer.token_ids == plain.token_ids
    assert answer.last.stats.num_steps <= LENGTH / 10
    beside = [
        Request(
            "p",
            PROMPT,
            SamplingParams(temperature=0, max_tokens=LENGTH),
            prediction=tuple(plain.token_ids),
        ),
        Request("q", (9, 3), SamplingParams(temperature=0, max_tokens=LENGTH)),
    ]
    both = run(engine_with("noisy", planner=planner(costs)), beside)
    assert both["p"].last.stats.num_steps <= LENGTH / 10
    assert both["q"].last.stats.num_predicted == 0


def test_what_is_recorded_of_a_drafter_leaves_predictions_out() -> None:
    engine = engine_with("noisy")
    plain = ask_for(engine_with(), [])
    seen: list[int] = []
    engine.observer = lambda blocks: seen.extend(len(block.confidence) for block in blocks)
    ask_for(engine, changed(plain.token_ids, 11))
    assert seen
    assert max(seen) <= 5


def test_beside_requests_that_have_none() -> None:
    plain = engine_with()
    requests = []
    for number in range(12):
        params = SamplingParams(
            temperature=float(number % 2), seed=number, max_tokens=30 + number, logprobs=2
        )
        requests.append(Request(str(number), (number, 3), params))
    alone = {r.request_id: run(plain, [r])[r.request_id] for r in requests}
    predicted = [
        Request(
            r.request_id,
            r.prompt_token_ids,
            r.params,
            prediction=tuple(changed(alone[r.request_id].token_ids, 9)) if i % 3 else (),
        )
        for i, r in enumerate(requests)
    ]
    for drafts in ("none", "noisy"):
        for key, answer in run(engine_with(drafts), predicted).items():
            assert answer.token_ids == alone[key].token_ids
            assert answer.logprobs == alone[key].logprobs


def test_unseeded_samples_accept_by_rejection_beside_a_drafter() -> None:
    """A prediction's drafts are point masses in one proposal with drafts that have a q."""
    params = SamplingParams(temperature=1.0, max_tokens=40)
    requests = [
        Request(str(i), PROMPT, params, prediction=(1, 2, 3, 4) * 10 if i % 2 else ())
        for i in range(6)
    ]
    for answer in run(engine_with("noisy"), requests).values():
        assert len(answer.token_ids) == 40


def test_up_to_the_context_limit() -> None:
    engine = engine_with("noisy")
    params = SamplingParams(temperature=0)
    plain = ask_for(engine_with(), [], params)
    assert len(plain.token_ids) == 128 - len(PROMPT)
    assert ask_for(engine, plain.token_ids * 2, params).token_ids == plain.token_ids


def test_a_stop_inside_a_predicted_block_ends_it_there() -> None:
    plain = ask_for(engine_with(), [])
    for length in range(1, 20):
        stop = plain.token_ids[length]
        if stop in plain.token_ids[:length]:
            continue
        params = SamplingParams(temperature=0, max_tokens=LENGTH, stop_token_ids=[stop], logprobs=0)
        answer = ask_for(engine_with("noisy"), plain.token_ids, params)
        assert answer.token_ids == plain.token_ids[: length + 1]
        assert len(answer.logprobs) == length + 1
        assert answer.last.stats.num_predicted_accepted <= length


def test_annotations_name_what_was_predicted() -> None:
    params = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=0, annotations=True)
    plain = ask_for(engine_with(), [])
    answer = ask_for(engine_with(), changed(plain.token_ids, 20), params)
    notes = [record.annotation for record in answer.logprobs]
    assert notes[0] is not None
    assert (notes[0].step, notes[0].origin) == (0, Origin.DECODED)
    origins = [note.origin for note in notes if note is not None]
    assert len(origins) == LENGTH
    assert origins.count(Origin.ACCEPTED) == answer.last.stats.num_predicted_accepted
    for note, token in zip(notes, answer.token_ids, strict=True):
        assert note is not None
        if note.origin is Origin.ACCEPTED:
            assert note.draft_id == token
            assert note.confidence is not None
        elif note.origin is Origin.RECOVERED:
            assert note.draft_id not in (None, token)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="speculate"):
        Request("r", PROMPT, SamplingParams(speculate=False), prediction=(1,))
    with pytest.raises(InvalidRequest, match="prediction holds token id 64"):
        engine_with().add(Request("r", PROMPT, prediction=(64,)))
