"""An engine in a process of its own: callers, refusals, and what is heard when either side dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from test_model_logprobs import make_folder

from emberline.cli.serving_engine import start_engine
from emberline.config import EngineConfig
from emberline.engine import messages
from emberline.engine.detokenizer import TokenText
from emberline.engine.output_stream import merge_outputs
from emberline.engine.process_engine import ProcessEngine, StartingEngine
from emberline.engine.running_engine import EngineStopped, ShuttingDown
from emberline.models.weights import ModelError
from emberline.types import (
    FinishReason,
    Grammar,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
    SamplingParams,
)

from support import bad_starts
from support.apart import saying_apart, scripted_apart, server_apart
from support.serving import make_tokenizer, say

TOKENIZER = make_tokenizer()
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessEngine]:
    """One that is small and slow enough to be full."""
    with saying_apart(
        num_drafts=4, wrong_every=3, delay=0.005, max_num_reqs=2, max_queue=4
    ) as running:
        yield running


def request(name: str, text: str = "Sunny day", **options: object) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 60, **options})  # type: ignore[arg-type]
    return Request(name, tuple(TOKENIZER(say(text))["input_ids"]), params)


async def read(engine: ProcessEngine, asked: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(asked)]


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))  # type: ignore[arg-type]


async def idle(engine: ProcessEngine) -> None:
    while True:
        state = engine.snapshot()
        if (state.num_running, state.num_waiting, state.kv_usage) == (0, 0, 0.0):
            return
        await asyncio.sleep(0.005)


def test_nothing_of_the_engine_is_here(engine: ProcessEngine) -> None:
    assert engine.pid != os.getpid()
    assert (engine.max_queue, engine.max_draft_tokens, engine.info["model"]) == (4, 4, "tiny")


def test_outputs_are_those_of_an_engine_in_a_thread(engine: ProcessEngine) -> None:
    """Every field of every output, whatever was asked for."""
    from test_async_engine import read as read_there
    from test_async_engine import running

    asked = [
        request("plain"),
        request("wide", logprobs=3, logprobs_mode="both", annotations=True, prompt_logprobs=2),
        request("ids", logprobs=0, logprob_token_ids=[5, 6], logit_bias={40: -100.0}),
        request("drawn", temperature=1.0, seed=2**64 - 1, top_p=0.9, stop=["a"], ignore_eos=True),
        request("bound", grammar=Grammar.choice(["Sunny", "rainy"])),
    ]

    async def work() -> None:
        with running() as here:
            for one in asked:
                if one.params.grammar is None:
                    expected = merge_outputs(await read_there(here, one))
                    assert merge_outputs(await read(engine, one)) == expected
        assert merge_outputs(await read(engine, asked[-1])).text in ("Sunny", "rainy")

    in_loop(work)


def test_callers_on_several_loops(engine: ProcessEngine) -> None:
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


def test_refusals_reach_the_caller_and_nobody_else(engine: ProcessEngine) -> None:
    async def work() -> None:
        with pytest.raises(InvalidRequest, match="prompt") as refused:
            await engine.submit(Request("bad", (10**6,), SamplingParams()))
        assert refused.value.param == "prompt"
        with pytest.raises(InvalidRequest):
            await engine.compile(Grammar("regex", "("))
        with pytest.raises(InvalidRequest):
            await engine.submit_all([request("a"), request("b"), request("a")])
        with pytest.raises(QueueFull, match="queue of 4") as full:
            await engine.submit_all([request(f"r{i}") for i in range(5)])
        assert full.value.retry_after >= 1
        streams = await engine.submit_all([request(f"r{i}") for i in range(4)])
        with pytest.raises(InvalidRequest, match="in use"):
            await engine.submit(request("r3"))
        for stream in streams:
            assert merge_outputs([output async for output in stream]).text == "Sunny day"
        await idle(engine)

    in_loop(work)


def test_leaving_early_aborts(engine: ProcessEngine) -> None:
    async def work() -> None:
        before = engine.snapshot().generation_tokens
        task = asyncio.ensure_future(read(engine, request("long", "x" * 90, max_tokens=100)))
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        late = asyncio.ensure_future(engine.submit(request("late", "x" * 90, max_tokens=100)))
        await asyncio.sleep(0)
        late.cancel()
        await idle(engine)
        assert engine.snapshot().generation_tokens - before < 90
        assert not engine._streams

    in_loop(work)


def test_what_is_kept_unread_does_not_grow_with_the_steps(engine: ProcessEngine) -> None:
    async def work() -> None:
        before = engine.snapshot().num_engine_steps
        stream = await engine.submit(request("slow", "x" * 100, max_tokens=120, logprobs=1))
        await idle(engine)
        assert engine.snapshot().num_engine_steps - before > 15
        assert len(stream._pending) < 10
        [output] = [output async for output in stream]
        assert (output.text, len(output.logprobs or ())) == ("x" * 100, 101)
        assert output.stats.num_emitted + 1 == len(output.token_ids)

    in_loop(work)


def test_the_cache_is_cleared(engine: ProcessEngine) -> None:
    async def work() -> None:
        await read(engine, request("a", "long enough for a page of its own"))
        assert engine.snapshot().num_cached_pages_share > 0
        await engine.clear_prefix_cache()
        assert engine.snapshot().num_cached_pages_share == 0

    in_loop(work)


def test_draining_then_shutting_down_gives_everyone_a_last_word() -> None:
    with scripted_apart(step_seconds=0.01, tokens_per_step=1, max_num_reqs=1) as engine:

        async def work() -> None:
            stream = await engine.submit(request("runs", max_tokens=1000))
            waits = await engine.submit(request("waits", logprobs=1))
            await anext(stream)
            engine.drain()
            for refused in (engine.submit(request("late")), engine.clear_prefix_cache()):
                with pytest.raises(ShuttingDown):
                    await refused
            assert not engine.health().ok
            await asyncio.to_thread(engine.shutdown)
            for one in (stream, waits):
                last = [output async for output in one][-1]
                assert last.finish_reason is FinishReason.ABORT
                assert last.error == "the engine was shut down"
            assert last.logprobs == ()

        in_loop(work)
        assert engine._process.returncode == 0


def test_a_failing_step_ends_everyone_and_the_process() -> None:
    with scripted_apart(break_at=4) as engine:

        async def work() -> None:
            answers = await asyncio.gather(
                *(read(engine, request(f"r{i}", logprobs=1)) for i in range(3))
            )
            for outputs in answers:
                assert outputs[-1].finish_reason is FinishReason.ERROR
                assert outputs[-1].error == "the engine failed: RuntimeError: boom"
            assert not engine.health().ok
            with pytest.raises(EngineStopped, match="boom"):
                await engine.submit(request("late"))
            engine.abort("late")  # harmless
            while engine.alive:
                await asyncio.sleep(0.01)

        in_loop(work)
        assert engine._process.returncode == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_process_is_told_over_http(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Pending calls end at once with an error, health says why, new ones hear 503."""
    with scripted_apart(step_seconds=0.02) as engine, server_apart(engine) as server:
        body = {"prompt": "free", "max_tokens": 10_000, "stream": stream}
        killer = threading.Timer(0.5, os.kill, (engine.pid, signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        answer = server.post("/v1/completions", body)
        assert time.monotonic() - began < 3
        assert "died: killed by SIGKILL" in answer.text
        assert answer.status_code == (200 if stream else 500)
        assert answer.text.endswith("data: [DONE]\n\n") == stream
        health = server.get("/health")
        assert (health.status_code, "SIGKILL" in health.text) == (503, True)
        refused = server.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")
        assert server.get("/metrics").status_code == 200
        left = engine.snapshot()  # nobody runs any more, for metrics and for who drains
        assert (left.num_running, left.num_waiting, left.kv_usage) == (0, 0, 0.0)
        assert left.generation_tokens > 0
    assert "no more requests are taken" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_step_that_does_not_come_back_is_noticed_and_ended() -> None:
    with scripted_apart(step_seconds=0.05, stall_timeout=0.3) as engine:

        async def work() -> None:
            await read(engine, request("a"))
            await asyncio.sleep(0.5)
            assert engine.health().ok
            stream = await engine.submit(request("b", max_tokens=1000))
            os.kill(engine.pid, signal.SIGSTOP)
            await asyncio.sleep(0.5)
            assert "0.3 s" in (engine.health().reason or "")
            await asyncio.to_thread(engine.shutdown, 0.2)
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.ABORT

        in_loop(work)
        assert not engine.alive


def test_an_engine_that_cannot_be_built_says_why() -> None:
    with (
        pytest.raises(ModelError, match="lower --kv-tokens"),
        StartingEngine(bad_starts.no_memory) as one,
    ):
        one.found()
    with pytest.raises(InvalidRequest) as refused, StartingEngine(bad_starts.bad_option) as one:
        one.found()
    assert refused.value.param == "thing"
    with StartingEngine(bad_starts.ends) as one:
        assert one.found() == (Path("x"), "x")
        with pytest.raises(ModelError, match="exit code 7"):
            one.ready(TokenText(TOKENIZER))
        one.close()


COMMAND = [sys.executable, "-c", "from emberline.cli import main; main()", "serve"]


@pytest.mark.parametrize("when", ["building", "built"])
def test_an_engine_whose_caller_is_killed_ends_too(when: str) -> None:
    """No orphan holds a device's memory."""
    paths = ("tests", "benchmarks")
    program = f"from support.bad_starts import wait_with_engine; wait_with_engine({when!r})"
    caller = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in paths)},
    )
    try:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        assert running(pid)
        caller.kill()
        caller.wait()
        end = time.monotonic() + 20
        while running(pid):
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        caller.kill()
        caller.communicate()


def running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_files_that_are_not_there_are_told_here(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="none: no such file or folder"):
        start_engine(
            str(tmp_path / "none"), None, EngineConfig(), process="on", log_level="warning"
        )


def test_a_server_whose_engine_has_a_process_drains_and_ends(tmp_path: Path) -> None:
    """As with a thread: a signal to both processes, exit code 0, no trace."""
    folder = make_folder(tmp_path / "small")
    server = subprocess.Popen(
        [*COMMAND, str(folder), "--port", "0", "--engine-process", "on", "--drafter", "none"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stderr is not None
    try:
        lines = iter(server.stderr)
        assert any("Application startup complete" in line for line in lines)
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does
        _, shown = server.communicate(timeout=20)
        assert server.returncode == 0
        assert "Traceback" not in shown
    finally:
        server.kill()
        server.communicate()


def test_a_delta_says_nothing_twice() -> None:
    """A step of 128 requests is a few bytes a token."""
    one = messages.Delta(7, (1, 2, 3), "abc", 40, [1, 2])
    assert len(messages.encode(one)) < 32


def test_an_engine_s_process_is_started_before_anything_slow_is_loaded() -> None:
    """The two would load PyTorch one after the other, and no call is taken meanwhile."""
    code = (
        "import sys, emberline.cli.serve, emberline.cli.serving_engine as e;"
        "from emberline.config import EngineConfig;"
        "assert e.on_gpu(EngineConfig(device='cuda:1'));"
        "assert not e.on_gpu(EngineConfig(device='cpu'));"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
