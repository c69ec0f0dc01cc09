"""Scoring from Python: arrays that line up with the tokens, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from emberline.scores import NO_ID
from emberline.types import InvalidRequest

from support.offline import offline

TEXTS = ["The Sunny day\n\nof un", [9, 8, 9, 30, 31], "a"]


def exact(loaded, ids):
    """[T, V] float64 log-probabilities; row i is of the token at i, row 0 of none."""
    target = loaded.engine.parts.target
    rows = [target.logits_after(list(ids[:i])).double().log_softmax(-1) for i in range(1, len(ids))]
    return torch.stack([torch.full((target.vocab_size,), torch.nan), *rows]).numpy()


@pytest.fixture
def front(monkeypatch):
    return offline(monkeypatch)


def test_arrays_line_up_with_the_tokens(front):
    llm, loaded = front
    results = llm.score(TEXTS, top=4)
    for text, scores in zip(TEXTS, results, strict=True):
        ids = llm.encode(text)
        assert scores.token_ids.tolist() == list(ids)
        assert scores.token_ids.dtype == scores.ranks.dtype == scores.top_ids.dtype == np.int64
        assert scores.logprobs.dtype == scores.top_logprobs.dtype == np.float32
        assert scores.top_ids.shape == scores.top_logprobs.shape == (len(ids), 4)
        assert np.isnan(scores.logprobs[0])
        assert scores.ranks[0] == 0
        assert (scores.top_ids[0] == NO_ID).all()
        assert np.isnan(scores.top_logprobs[0]).all()
        values = exact(loaded, ids)
        for i in range(1, len(ids)):
            assert scores.logprobs[i] == pytest.approx(values[i][ids[i]], abs=1e-5)
            assert scores.ranks[i] == 1 + (values[i] > values[i][ids[i]]).sum()
            best = np.argsort(-values[i], kind="stable")[:4]
            assert scores.top_ids[i].tolist() == best.tolist()
            assert scores.top_logprobs[i] == pytest.approx(values[i][best], abs=1e-5)
        assert scores.error is None
        total = sum(values[i][ids[i]] for i in range(1, len(ids)))
        assert scores.sum == pytest.approx(total, abs=1e-4)
    assert results[2].sum == 0.0
    assert math.isnan(results[2].mean)
    assert loaded.engine.snapshot().kv_usage == 0


def test_a_start_leaves_out_what_is_before_it(front):
    llm, _ = front
    [whole], [tail] = llm.score(TEXTS[:1]), llm.score(TEXTS[:1], start=5)
    assert tail.start == 5
    assert np.isnan(tail.logprobs[:5]).all()
    assert (tail.logprobs[5:] == whole.logprobs[5:]).all()
    assert tail.mean == pytest.approx(whole.logprobs[5:].mean(), abs=1e-6)
    assert tail.top_ids.shape == (len(tail.token_ids), 0)


def test_the_whole_vocabulary(front):
    llm, loaded = front
    [scores] = llm.score([[9, 8, 9]], top=-1)
    assert scores.top_ids.shape == (3, loaded.engine.vocab_size)
    assert np.exp(scores.top_logprobs[1:]).sum(-1) == pytest.approx(1, abs=1e-5)


def test_continuations_are_scored_given_their_prompts(front):
    llm, loaded = front
    pairs = [("<say>Sunny</say>", "Sunny"), ("<say>Sunny</say>", "Run"), ([9, 8], [7])]
    told, other, ids = llm.score_continuations(pairs, top=1)
    assert told.start == len(llm.encode("<say>Sunny</say>"))
    assert told.token_ids[told.start :].tolist() == list(llm.encode("Sunny"))
    assert told.is_greedy
    assert not other.is_greedy
    assert told.sum > other.sum
    assert np.isnan(told.logprobs[: told.start]).all()
    values = exact(loaded, ids.token_ids.tolist())
    assert ids.sum == ids.mean == pytest.approx(values[2][7], abs=1e-5)


def test_a_prompt_that_was_computed_before_is_found(front):
    llm, loaded = front
    prompt = "<say>" + "Sunny" * 8 + "</say>"
    [first] = llm.score_continuations([(prompt, "Sun")])
    assert loaded.engine.snapshot().prefix_hit_tokens == 0
    again, _ = llm.score_continuations([(prompt, "Sun"), (prompt, "Run")])
    assert loaded.engine.snapshot().prefix_hit_tokens > first.start
    assert np.array_equal(first.logprobs, again.logprobs, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"top": -2}, "top"),
        ({"top": 10_000}, "top"),
        ({"top": True}, "top"),
        ({"top": 1.0}, "top"),
        ({"start": 4}, "start"),
        ({"start": -1}, "start"),
        ({"start": "2"}, "start"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(front, options, param):
    llm, loaded = front
    with pytest.raises(InvalidRequest) as caught:
        llm.score([[9, 8, 9, 9], [9, 9, 9, 9]], **options)
    assert caught.value.param == param
    assert not loaded.engine.has_work


@pytest.mark.parametrize("pair", [("", "x"), ("x", ""), ([9], [])])
def test_a_pair_has_two_sides(front, pair):
    llm, _ = front
    with pytest.raises(InvalidRequest, match="has no token") as caught:
        llm.score_continuations([("a", "b"), pair])
    assert caught.value.param == "pairs"


def test_a_text_that_the_engine_gives_up_says_so(front):
    llm, loaded = front
    nothing = torch.full((loaded.engine.vocab_size,), torch.nan)
    loaded.engine.parts.target.overrides[(9, 8)] = nothing
    broken, fine = llm.score([[9, 8, 7], [9, 9, 7]])
    assert broken.error
    assert np.isnan(broken.logprobs).all()
    assert math.isnan(broken.sum)
    assert fine.error is None
    assert np.isfinite(fine.logprobs[1:]).all()
