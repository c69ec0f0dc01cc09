"""The thread round the engine: many callers, cancelling, failing, stalling, shutting down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest
import torch

from emberline.engine import engine_loop
from emberline.engine.async_engine import AsyncEngine
from emberline.engine.detokenizer import TokenText
from emberline.engine.engine import Engine
from emberline.engine.output_stream import MERGED_RECORDS, merge_outputs, num_records
from emberline.engine.running_engine import EngineStopped, ShuttingDown
from emberline.types import (
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

from support.engines import make_engine
from support.paged import PrefixDrafter, PrefixTarget
from support.serving import SayingTarget, make_tokenizer, say, serve

TOKENIZER = make_tokenizer()
TEXT = TokenText(TOKENIZER)


@contextlib.contextmanager
def running(
    *, break_at: int | None = None, delay: float = 0.0, stall: float = 300.0, **scheduler: int
) -> Iterator[AsyncEngine]:
    """An engine whose step number `break_at` raises."""
    target = SayingTarget(TOKENIZER)
    target.delay = delay
    engine = make_engine(
        target, PrefixDrafter(target, 4, 3), num_pages=1024, eos_ids=(target.eos,), **scheduler
    )
    if break_at is not None:
        _break(engine, break_at)
    before = set(threading.enumerate())  # servers of other tests may be up
    made = AsyncEngine(engine, TEXT, stall_timeout=stall)
    new = set(threading.enumerate()) - before
    [own] = [thread for thread in new if thread.name == "emberline-engine"]
    try:
        yield made
    finally:
        made.shutdown()
        assert not own.is_alive()


def _break(engine: Engine, at: int) -> None:
    """Make the engine's step number `at` raise."""
    step, count = engine.step, 0

    def breaking() -> list[RequestOutput]:
        nonlocal count
        count += 1
        if count == at:
            raise RuntimeError("boom")
        return step()

    engine.step = breaking  # type: ignore[method-assign]


def request(name: str, text: str = "Sunny day", **options: object) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **options})  # type: ignore[arg-type]
    return Request(name, tuple(TOKENIZER(say(text))["input_ids"]), params)


async def read(engine: AsyncEngine, asked: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(asked)]


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))  # type: ignore[arg-type]


async def idle(engine: AsyncEngine) -> None:
    while True:
        state = engine.snapshot()
        if (state.num_running, state.num_waiting, state.kv_usage) == (0, 0, 0.0):
            return
        await asyncio.sleep(0.005)


def test_many_at_once_each_get_their_own() -> None:
    with running() as engine:

        async def work() -> None:
            texts = [f"answer {i} " * (1 + i % 3) for i in range(20)]
            asked = [request(f"r{i}", text, logprobs=1) for i, text in enumerate(texts)]
            answers = await asyncio.gather(*(read(engine, one) for one in asked))
            for text, outputs in zip(texts, answers, strict=True):
                merged = merge_outputs(outputs)
                assert merged.text == text
                assert len(merged.logprobs or ()) == len(merged.token_ids)
                assert merged.num_output_tokens == len(merged.token_ids)
                assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
            await idle(engine)

        in_loop(work)


def test_an_engine_without_work_gets_ready_one_thing_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a while without requests; a request in between waits for one thing at most."""
    monkeypatch.setattr(engine_loop, "QUIET_SECONDS", 0.01)
    had_work: list[bool] = []
    all_done = threading.Event()

    def get_ready(engine: Engine) -> bool:
        had_work.append(engine.has_work)
        if len(had_work) == 6:
            all_done.set()
        return len(had_work) < 6

    monkeypatch.setattr(Engine, "get_ready", get_ready)
    with running() as engine:
        assert all_done.wait(10.0)
        in_loop(lambda: read(engine, request("late")))
    assert not any(had_work)
    assert len(had_work) <= 7  # once more after the request


def test_callers_on_several_loops() -> None:
    with running() as engine:
        texts: dict[int, str] = {}

        def caller(i: int) -> None:
            outputs = asyncio.run(read(engine, request(f"t{i}", f"loop {i}")))
            texts[i] = merge_outputs(outputs).text

        threads = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert texts == {i: f"loop {i}" for i in range(4)}


def test_refusals_reach_the_caller_and_nobody_else() -> None:
    with running(max_queue=2, max_num_reqs=1, delay=0.01) as engine:

        async def work() -> None:
            with pytest.raises(InvalidRequest, match="prompt"):
                await engine.submit(Request("bad", (10**6,), SamplingParams()))
            busy = [await engine.submit(request("a", "x" * 50))]
            while engine.snapshot().num_running == 0:
                await asyncio.sleep(0.001)
            busy += [await engine.submit(request(name)) for name in "bc"]
            with pytest.raises(QueueFull):
                await engine.submit(request("d"))
            with pytest.raises(InvalidRequest, match="in use"):
                await engine.submit(request("c"))
            texts = [merge_outputs([output async for output in stream]).text for stream in busy]
            assert texts == ["x" * 50, "Sunny day", "Sunny day"]

        in_loop(work)


@pytest.mark.parametrize("how", ["close", "cancel", "break"])
def test_leaving_early_aborts(how: str) -> None:
    with running(delay=0.01) as engine:

        async def work() -> None:
            asked = request("long", "x" * 50)
            if how == "cancel":
                task = asyncio.ensure_future(read(engine, asked))
                await asyncio.sleep(0.05)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            else:
                outputs = engine.generate(asked)
                async for _ in outputs:
                    break
                if how == "close":
                    await outputs.aclose()  # type: ignore[attr-defined]
                del outputs
            await idle(engine)
            assert engine.snapshot().generation_tokens < 50

        in_loop(work)


def test_cancelling_before_admission_leaves_nothing_behind() -> None:
    with running(delay=0.05) as engine:

        async def work() -> None:
            stream = await engine.submit(request("a", "x" * 20))
            late = asyncio.ensure_future(engine.submit(request("b", "x" * 50)))
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.sleep(0.2)
            await stream.aclose()
            await idle(engine)

        in_loop(work)


def test_a_reader_that_does_not_read_costs_one_merged_output() -> None:
    with running() as engine:

        async def work() -> None:
            stream = await engine.submit(request("slow", "x" * 40, logprobs=0))
            assert (await read(engine, request("other")))[-1].finished
            await idle(engine)
            outputs = [output async for output in stream]
            assert len(outputs) == 1
            assert outputs[0].text == "x" * 40
            assert len(outputs[0].logprobs or ()) == 41

        in_loop(work)


def test_what_is_kept_unread_does_not_grow_with_the_steps() -> None:
    with running() as engine:

        async def work() -> None:
            stream = await engine.submit(request("slow", "x" * 100, max_tokens=120, logprobs=1))
            await idle(engine)
            assert engine.snapshot().num_engine_steps > 30
            assert num_outputs() - before < 10  # what other tests hold is not ours
            assert merge_outputs([output async for output in stream]).text == "x" * 100

        gc.collect()
        before = num_outputs()
        in_loop(work)


def num_outputs() -> int:
    return sum(type(one) is RequestOutput for one in gc.get_objects())


def test_unread_outputs_are_merged_only_so_far() -> None:
    """Each stays small enough to be written without holding up whoever else is on the loop."""
    with running() as engine:

        async def work() -> None:
            asked = request("wide", "x" * 100, max_tokens=120, logprobs=100)
            stream = await engine.submit(asked)
            await idle(engine)
            outputs = [output async for output in stream]
            assert len(outputs) > 3
            assert all(num_records(one) < MERGED_RECORDS + 6 * 102 for one in outputs)
            assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
            merged = merge_outputs(outputs)
            assert (merged.text, len(merged.logprobs or ())) == ("x" * 100, 101)

        in_loop(work)


def test_several_requests_are_admitted_all_or_none() -> None:
    with running(max_queue=4, max_num_reqs=1, delay=0.01) as engine:

        async def work() -> None:
            with pytest.raises(InvalidRequest):
                await engine.submit_all([request("a"), request("b", temperature=0), request("a")])
            with pytest.raises(QueueFull):
                await engine.submit_all([request(f"r{i}") for i in range(5)])
            streams = await engine.submit_all([request(f"r{i}") for i in range(4)])
            for stream in streams:
                assert merge_outputs([output async for output in stream]).text == "Sunny day"
            await idle(engine)

        in_loop(work)


def test_a_draining_engine_finishes_what_it_has() -> None:
    with running(max_num_reqs=1, delay=0.01) as engine:

        async def work() -> None:
            streams = [await engine.submit(request(name)) for name in ("runs", "waits")]
            engine.drain()
            with pytest.raises(ShuttingDown):
                await engine.submit(request("late"))
            assert not engine.health().ok
            for stream in streams:
                assert merge_outputs([output async for output in stream]).text == "Sunny day"
            await idle(engine)

        in_loop(work)


def test_a_failing_step_ends_everyone_and_the_engine() -> None:
    with running(break_at=4) as engine:

        async def work() -> None:
            answers = await asyncio.gather(
                *(read(engine, request(f"r{i}", "x" * 40, logprobs=1)) for i in range(3))
            )
            for outputs in answers:
                assert outputs[-1].finish_reason is FinishReason.ERROR
                assert "boom" in (outputs[-1].error or "")
                merged = merge_outputs(outputs)
                assert len(merged.logprobs or ()) == len(merged.token_ids)
            assert not engine.health().ok
            with pytest.raises(EngineStopped, match="boom"):
                await engine.submit(request("late"))
            engine.abort("late")  # harmless

        in_loop(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_engine_is_told_over_http(stream: bool) -> None:
    """D29: pending calls get an error, health turns 503, nothing hangs."""
    target = SayingTarget(TOKENIZER)
    engine = make_engine(target, num_pages=1024, eos_ids=(target.eos,))
    _break(engine, 5)
    with serve(engine, TOKENIZER, target) as server:
        body = {"prompt": say("Sunny day"), "temperature": 0, "stream": stream}
        answer = server.post("/v1/completions", body)
        if stream:
            *_, error, done, _ = answer.text.split("\n\n")
            assert '"error":{"message":"the engine failed: RuntimeError: boom"' in error
            assert done == "data: [DONE]"
        else:
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "internal_server_error"
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", body).status_code == 503
        assert server.get("/metrics").status_code == 200


def test_a_step_that_does_not_come_back_is_noticed() -> None:
    """D29: stuck, not dead."""
    with running(delay=0.6, stall=0.1) as engine:

        async def work() -> None:
            stream = await engine.submit(request("a"))
            assert engine.health().ok
            await asyncio.sleep(0.3)
            health = engine.health()
            assert not health.ok
            assert "0.1 s" in (health.reason or "")
            await stream.aclose()

        in_loop(work)


def test_shutting_down_gives_everyone_a_last_word() -> None:
    with running(delay=0.01) as engine:

        async def work() -> None:
            stream = await engine.submit(request("a", "x" * 50))
            await anext(stream)
            await asyncio.to_thread(engine.shutdown)
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.ABORT
            with pytest.raises(EngineStopped):
                await engine.submit(request("b"))
            assert not engine.health().ok

        in_loop(work)


def test_the_cache_is_cleared_between_steps_or_not_at_all() -> None:
    with running() as engine:

        async def work() -> None:
            await read(engine, request("a", "long enough for a page of its own"))
            await idle(engine)
            assert engine.snapshot().num_cached_pages_share > 0
            await engine.clear_prefix_cache()
            engine.shutdown()
            with pytest.raises(ShuttingDown):
                await engine.clear_prefix_cache()

        in_loop(work)
        assert engine.snapshot().num_cached_pages_share == 0


def test_a_cache_that_cannot_be_cleared_is_told() -> None:
    engine = make_engine(PrefixTarget(), eos_ids=())

    def clear() -> None:
        raise RuntimeError("boom")

    engine.clear_prefix_cache = clear  # type: ignore[method-assign]
    served = AsyncEngine(engine, TEXT)

    async def work() -> None:
        with pytest.raises(EngineStopped, match="boom"):
            await served.clear_prefix_cache()
        while served.health().ok:  # its thread is about to say so
            await asyncio.sleep(0.005)

    in_loop(work)


def test_an_idle_engine_sleeps() -> None:
    with running() as engine:

        async def work() -> None:
            await read(engine, request("a"))
            await idle(engine)

        in_loop(work)
        began, used = time.monotonic(), time.process_time()
        time.sleep(0.3)
        assert (time.process_time() - used) / (time.monotonic() - began) < 0.2


def test_merging_keeps_every_delta() -> None:
    record = TokenLogprobs(1, -0.5, 1)
    prompt = (None, record)
    parts = [
        RequestOutput("r", (1,), (record,), "a", prompt_logprobs=prompt, num_output_tokens=1),
        RequestOutput("r", (2, 3), (record, record), "", num_output_tokens=3),
        RequestOutput("r", (), (), "b", finish_reason=FinishReason.STOP, num_output_tokens=3),
    ]
    merged = merge_outputs(parts)
    assert (merged.token_ids, merged.text, len(merged.logprobs or ())) == ((1, 2, 3), "ab", 3)
    assert merged.prompt_logprobs == prompt
    assert (merged.num_output_tokens, merged.finish_reason) == (3, FinishReason.STOP)


def test_a_stream_that_fails_to_start_is_an_ordinary_error() -> None:
    target = SayingTarget(TOKENIZER)
    with serve(make_engine(target, num_pages=64), TOKENIZER, target) as server:
        body = {"prompt": [10**6], "stream": True}
        answer = httpx.post(server.url + "/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("logprobs", [None, 2])
def test_nan_logits_fail_their_request_alone(logprobs: int | None) -> None:
    """D21: the same error with and without logprobs; the server goes on."""
    target = SayingTarget(TOKENIZER)
    engine = make_engine(target, num_pages=1024, eos_ids=(target.eos,))
    bad = tuple(TOKENIZER("bad")["input_ids"])
    target.overrides[bad] = torch.full((target.vocab_size,), float("nan"))
    with serve(engine, TOKENIZER, target) as server:
        body = {"prompt": "bad", "logprobs": logprobs}
        for stream in (False, True):
            answer = server.post("/v1/completions", {**body, "stream": stream})
            assert answer.status_code == 500
            assert "NaN" in answer.json()["error"]["message"]
        server.alive()


def test_who_comes_behind_a_call_that_breaks_the_engine_hears_of_it():
    """D29: nobody is left waiting for an answer that cannot come."""
    engine = make_engine(PrefixTarget(), eos_ids=())
    take = engine.add

    def add(request, text=None):
        if request.request_id == "breaks":
            raise TypeError("a bug")
        take(request, text)

    engine.add = add
    served = AsyncEngine(engine, NoText())

    async def calls():
        with served._loop.changed:  # both are in the same batch
            tasks = [
                asyncio.ensure_future(served.submit(Request(name, (2,), SamplingParams())))
                for name in ("breaks", "behind it")
            ]
            await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    assert all(isinstance(problem, EngineStopped) for problem in asyncio.run(calls()))


class NoText:
    def stream(self, params):
        return None
