"""The asyncio front door: many calls at once, and nothing left behind by those that end early."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from emberline.engine.running_engine import EngineStopped
from emberline.types import FinishReason, InvalidRequest, SamplingParams

from support.offline import offline, offline_async

GREEDY = SamplingParams(temperature=0, max_tokens=40)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def front(monkeypatch):
    return offline_async(monkeypatch)


def drive(llm, main):
    """Run a coroutine function over `llm`, close it, and see that it left nothing running."""

    async def whole():
        async with llm:
            result = await main(llm)
            await rest(llm)
            return result

    return asyncio.run(asyncio.wait_for(whole(), 60))


async def rest(llm):
    end = time.monotonic() + 10
    while (now := llm.engine.snapshot()).num_running or now.num_waiting or now.kv_usage:
        assert time.monotonic() < end, now
        await asyncio.sleep(0.01)


def test_calls_at_the_same_time_get_their_own_answers(front):
    words = ["one", "Sunny", "three of them", "four"]

    async def main(llm):
        return await asyncio.gather(*(llm.generate(f"<say>{w}</say>", GREEDY) for w in words))

    answers = drive(front[0], main)
    assert [answer.text for (answer,) in answers] == words
    assert all(answer.finish_reason is FinishReason.STOP for (answer,) in answers)
    assert answers[1][0].stats.num_accepted > 0


def test_it_answers_as_the_offline_front_door_does(front, monkeypatch):
    seeded = SamplingParams(temperature=1, seed=3, n=3, max_tokens=12, logprobs=2)
    messages = [{"role": "user", "content": "<say>Hi</say>"}]

    async def main(llm):
        return (
            await llm.generate("Sun", seeded),
            await llm.chat(messages, GREEDY),
            await llm.score(["The Sunny", [9, 8, 9]], top=2, start=1),
            await llm.score_continuations([("a", " the")]),
        )

    choices, reply, scored, pairs = drive(front[0], main)
    other, _ = offline(monkeypatch)
    for got, wanted in zip(choices, other.generate(["Sun"], seeded)[0], strict=True):
        assert (got.text, got.token_ids, got.logprobs) == (
            wanted.text,
            wanted.token_ids,
            wanted.logprobs,
        )
    assert len({answer.token_ids for answer in choices}) > 1
    assert reply.text == other.chat(messages, GREEDY).text == "Hi"
    wanted = [*other.score(["The Sunny", [9, 8, 9]], top=2, start=1)]
    wanted += other.score_continuations([("a", " the")])
    for got, want in zip([*scored, *pairs], wanted, strict=True):
        assert np.array_equal(got.logprobs, want.logprobs, equal_nan=True)
        assert np.array_equal(got.top_ids, want.top_ids)
        assert got.start == want.start


def test_a_stream_is_deltas_and_leaving_it_aborts(front):
    async def main(llm):
        whole = [output async for output in llm.stream("<say>Sunny days</say>", GREEDY)]
        async for output in llm.stream("Sun", ENDLESS):
            assert output.token_ids
            break
        return whole

    outputs = drive(front[0], main)
    assert "".join(output.text for output in outputs) == "Sunny days"
    assert len(outputs) > 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("n", [1, 3])
def test_a_cancelled_call_is_aborted(front, n):
    llm, loaded = front
    loaded.engine.parts.target.delay = 0.02

    async def main(llm):
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, n=n)
        call = asyncio.ensure_future(llm.generate("Sun", params))
        while llm.engine.snapshot().num_running < n:
            await asyncio.sleep(0.005)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await rest(llm)
        return llm.engine.snapshot().generation_tokens

    assert drive(llm, main) < 200 * n


def test_more_calls_than_the_queue_holds_wait_their_turn(monkeypatch):
    llm, _ = offline_async(monkeypatch, max_queue=2, max_num_reqs=2)

    async def main(llm):
        calls = [llm.generate(f"<say>{i}</say>", GREEDY) for i in range(12)]
        return await asyncio.gather(*calls)

    assert [answer.text for (answer,) in drive(llm, main)] == [str(i) for i in range(12)]


def test_a_refusal_ends_the_whole_call_and_no_other(front):
    async def main(llm):
        beside = asyncio.ensure_future(llm.generate("<say>fine</say>", GREEDY))
        with pytest.raises(InvalidRequest) as caught:
            await llm.score([[9, 8], [9, 1_000_000]])
        assert caught.value.param == "prompt"
        for call in (llm.chat([{"role": "user", "content": "x"}], SamplingParams(n=2)),):
            with pytest.raises(InvalidRequest, match="use generate"):
                await call
        with pytest.raises(InvalidRequest, match="wrap one"):
            await llm.score("text")
        with pytest.raises(InvalidRequest, match="use generate"):
            await anext(llm.stream("x", SamplingParams(n=2)))
        return await beside

    [answer] = drive(front[0], main)
    assert answer.text == "fine"


def test_options_of_a_call(front):
    llm, loaded = front
    loaded.engine.parts.target.delay = 0.02

    async def main(llm):
        return await llm.generate("Sun", ENDLESS, timeout=0.2)

    [answer] = drive(llm, main)
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.ABORT, "timeout")
    assert 0 < len(answer.token_ids) < 200


def test_closing_ends_what_runs_and_refuses_more(front):
    llm, loaded = front
    loaded.engine.parts.target.delay = 0.02

    async def main():
        call = asyncio.ensure_future(llm.generate("Sun", ENDLESS))
        while not llm.engine.snapshot().num_running:
            await asyncio.sleep(0.005)
        await llm.aclose()
        [answer] = await call
        with pytest.raises(EngineStopped):
            await llm.generate("Sun", GREEDY)
        return answer

    answer = asyncio.run(asyncio.wait_for(main(), 30))
    assert answer.finish_reason is FinishReason.ABORT
