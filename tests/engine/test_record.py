"""Recording what speculation did, request by request."""

from __future__ import annotations

import pytest

from emberline.engine.record import record
from emberline.models.weights import ModelError
from emberline.types import InvalidRequest, Request, SamplingParams

from support.doubles import Prefix, ScriptedDrafter
from support.engines import make_engine
from support.paged import PrefixTarget

DRAFTS = 3


def drafter(target: PrefixTarget) -> ScriptedDrafter:
    """Right about every token but multiples of 3."""

    def guess(prefix: Prefix) -> int:
        best = int(target.logits_after(list(prefix)).argmax())
        return best if best % 3 else (best + 1) % target.vocab_size

    return ScriptedDrafter(DRAFTS, None, guess, confidence=lambda prefix: (len(prefix) % 7) / 10)


def requests(count: int, max_tokens: int = 12) -> list[Request]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return [Request(str(i), (5, i), params) for i in range(count)]


def test_every_request_comes_with_its_own_blocks_in_order() -> None:
    target = PrefixTarget()
    engine = make_engine(target, drafter(target), eos_ids=(), max_num_reqs=2, max_queue=2)
    done = {r.request.request_id: r for r in record(engine, requests(7))}
    assert sorted(done) == [str(i) for i in range(7)]
    for i in range(7):
        recorded = done[str(i)]
        tokens = [5, i, *recorded.token_ids]
        assert tokens == [5, i, *target.greedy([5, i], 12)]
        end = 3  # the first token is the prompt's: nothing is drafted before it
        for block in recorded.blocks:
            assert block.request_id == str(i)
            expected = [((end + k) % 7) / 10 for k in range(len(block.confidence))]
            assert block.confidence == pytest.approx(expected)
            assert block.num_verified == len(block.confidence)
            right = [bool(t % 3) for t in tokens[end : end + block.num_verified]]
            assert block.num_accepted == [*right, False].index(False)
            end += block.num_accepted + 1
        # Where one token is left nothing is drafted.
        assert end in (len(tokens), len(tokens) - 1)


def test_an_observer_that_was_there_comes_back() -> None:
    target = PrefixTarget()
    engine = make_engine(target, drafter(target), eos_ids=())
    engine.observer = seen = lambda blocks: None
    assert len(list(record(engine, requests(2)))) == 2
    assert engine.observer is seen


def test_closing_aborts_what_runs() -> None:
    target = PrefixTarget()
    engine = make_engine(target, drafter(target), eos_ids=(), max_num_reqs=2)
    recording = record(engine, [*requests(1, 2), *requests(6, 60)[1:]])
    assert next(recording).request.request_id == "0"
    recording.close()
    assert engine.observer is None
    engine.step()
    assert not engine.has_work
    assert engine.snapshot().kv_usage == 0
    assert engine.snapshot().generation_tokens < 60


def test_nothing_starts_if_one_request_cannot_run() -> None:
    target = PrefixTarget()
    engine = make_engine(target, drafter(target))
    with pytest.raises(InvalidRequest, match="exceed"):
        list(record(engine, [*requests(2), Request("x", (1,), SamplingParams(max_tokens=500))]))
    assert not engine.has_work


def test_a_request_that_breaks_is_an_error_not_a_gap() -> None:
    target = PrefixTarget()
    target.overrides[5, 1] = target.logits_after([5, 1]) * float("nan")
    engine = make_engine(target, drafter(target), eos_ids=())
    with pytest.raises(ModelError, match="request 1: no token can be drawn"):
        list(record(engine, requests(3)))
