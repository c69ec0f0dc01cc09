"""The live audit: ours passes, a fault is caught and logged, clients notice nothing."""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch
from prometheus_client import CollectorRegistry
from test_around import counters
from test_model_logprobs import GOLDEN, make_folder

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.engine import outcome as outcome_module
from emberline.llm import load_engine
from emberline.server import live_audit
from emberline.server.audit_metrics import AuditMetrics
from emberline.server.live_audit import LiveAudit, default_tolerance
from emberline.server.rescoring import Finished, compare, reproduction
from emberline.types import (
    EngineSnapshot,
    FinishReason,
    Grammar,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

from support.serving import SayingTarget, saying_server, serve, strict

NAME = "emberline:logprob_audit_requests_total"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(live_audit, "QUIET_SECONDS", 0.02)


@contextmanager
def audited(rate=1.0, tolerance=None, **settings):
    options = {"verify_logprobs": rate, "verify_tolerance": tolerance}
    with saying_server(
        **{"num_drafts": 4, "wrong_every": 3}, options=options, **settings
    ) as server:
        yield server


def info(server):
    return strict(server.get("/server_info").content)["logprob_audit"]


def until(server, condition, seconds=60.0):
    """Wait until the audit's figures fulfil a condition; those figures."""
    end = time.monotonic() + seconds
    while not condition(now := info(server)):
        assert time.monotonic() < end, now
        time.sleep(0.01)
    return now


def settled(server, number):
    keys = ("passed", "failed", "error", "dropped")
    return until(server, lambda now: sum(now[key] for key in keys) >= number)


REQUESTS = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 5, "logprobs": 2, "logprobs_mode": "both"},
    {"temperature": 1.0, "top_p": 0.7, "logprobs": 2, "logprobs_mode": "processed"},
    {"temperature": 0.7, "frequency_penalty": 1.5, "logit_bias": {"20": 5}, "n": 3},
    {"stop": ["nn"], "min_tokens": 2},
    {"echo": True, "logprobs": 1},
    {"max_tokens": 1},
    {"temperature": 1.0, "stream": True, "logprobs": 1},
]


def test_our_own_values_pass_whatever_was_asked():
    with audited() as server:
        for options in REQUESTS:
            body = {"prompt": "<say>Sunny days</say> and", "max_tokens": 24, **options}
            assert server.post("/v1/completions", body).status_code == 200
        server.chat("hello", max_tokens=9)
        number = len(REQUESTS) + 2 + 1
        now = settled(server, number)
        assert now == {
            "rate": 1.0,
            "tolerance": 1e-4,
            "backlog": 0,
            "passed": number,
            "failed": 0,
            "error": 0,
            "dropped": 0,
            "max_abs_diff": 0.0,
        }
        seen = counters(server)
        assert value(seen, NAME, result="passed") == number
        assert value(seen, "emberline:logprob_audit_max_abs_diff") == 0.0
        assert value(seen, "emberline:logprob_audit_backlog") == 0
        tokens = value(seen, "emberline:logprob_audit_abs_diff_count")
        assert tokens == value(seen, "vllm:generation_tokens_total")
        assert value(seen, "emberline:logprob_audit_abs_diff_bucket", le="0.0") == tokens
        assert value(seen, "emberline:logprob_audit_prompt_tokens_total") > tokens
        server.rest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_model_passes_in_a_crowd(dtype, tmp_path):
    """Drafted, batched, preempted, from the cache: what was emitted is what a rescoring says."""
    config = EngineConfig(
        dtype=dtype,
        cache=CacheConfig(num_tokens=256),
        scheduler=SchedulerConfig(max_num_reqs=8, prefill_chunk=32, max_model_len=128),
        speculation=SpeculationConfig(planner="threshold", threshold=0.4),
    )
    folder = make_folder(tmp_path / "target")
    loaded = load_engine(str(folder), str(GOLDEN / "gated"), config, progress=False)
    torch.set_num_threads(1)
    shared = "The same beginning for all of them, longer than a page: "
    with (
        serve(loaded.engine, loaded.tokenizer, verify_logprobs=1.0) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [
            pool.submit(server.complete, shared + str(i), temperature=i % 2, max_tokens=30)
            for i in range(8)
        ]
        for call in asked:
            call.result()
        now = settled(server, 8)
        assert now["passed"] == 8
        assert now["max_abs_diff"] <= now["tolerance"]
        if server.engine.info["bitwise"]:
            assert now["max_abs_diff"] == 0.0
        assert server.engine.snapshot().num_preemptions > 0
        assert server.engine.snapshot().prefix_hit_tokens > 0


def value(seen, name, **labels):
    return seen[name + (str(sorted(labels.items())) if labels else "")]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_a_server_without_an_audit(stream):
    def answers(server):
        for options in REQUESTS:
            body = {"prompt": "<say>Sun</say> and", "max_tokens": 12, "seed": 1, **options}
            body["stream"] = stream
            text = server.post("/v1/completions", body).text
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
            for line in lines:
                if line != "[DONE]":
                    event = strict(line)
                    del event["id"], event["created"]
                    yield event

    with audited() as on, saying_server(num_drafts=4, wrong_every=3) as off:
        assert joined(answers(on)) == joined(answers(off))


def joined(events):
    """Per choice and field what all events say: where a step's event is cut depends on time."""
    whole = {}
    for event in events:
        assert event["choices"] or "usage" in event
        for choice in event["choices"]:
            key = choice["index"], len(whole) if choice.get("finish_reason") else None
            whole.setdefault(key, []).append(choice["text"])
            for name, items in (choice["logprobs"] or {}).items():
                whole.setdefault((choice["index"], name), []).extend(items or [])
    return {key: "".join(v) if v and isinstance(v[0], str) else v for key, v in whole.items()}


def test_off_there_is_no_audit(monkeypatch):
    monkeypatch.setattr(LiveAudit, "__init__", None)
    asked = []
    with saying_server() as server:
        add = server.engine._engine.add
        monkeypatch.setattr(
            server.engine._engine,
            "add",
            lambda request, *rest: (asked.append(request), add(request, *rest))[1],
        )
        server.complete("<say>ok</say>")
        assert info(server) is None
        assert "logprob_audit" not in server.get("/metrics").text
    assert [request.params.logprobs for request in asked] == [None]


def test_a_rate_between_samples_some():
    audit = make_audit(rate=0.25)
    requests = [Request(f"{i}", (1,), SamplingParams(max_tokens=1)) for i in range(2000)]
    watch = audit.watch(requests)
    sampled = sum(request.params.logprobs is not None for request in watch.requests)
    assert 400 < sampled < 600


# What is wrong with an engine's values, by the tokens of one step.
FAULTS = {
    "shifted by one": lambda run: [*run[1:], run[0]],
    "zero": lambda run: [record._replace(logprob=0.0) for record in run],
    "a little": lambda run: [*run[:-1], run[-1]._replace(logprob=run[-1].logprob - 0.01)],
    "not a number": lambda run: [record._replace(logprob=math.nan) for record in run],
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_counted_and_logged_with_a_reproduction(fault, monkeypatch, caplog):
    score = outcome_module.score_emitted

    def sabotaged(plan, result):
        records = score(plan, result)
        return [None if run is None else tuple(FAULTS[fault](run)) for run in records]

    monkeypatch.setattr(outcome_module, "score_emitted", sabotaged)
    with caplog.at_level(logging.ERROR), audited() as server:
        body = {"prompt": "Sun", "max_tokens": 20, "temperature": 1.0, "seed": 7, "top_p": 0.9}
        answer = strict(server.post("/v1/completions", {**body, "return_token_ids": True}).content)
        now = settled(server, 1)
        assert (now["passed"], now["failed"]) == (0, 1)
        assert now["max_abs_diff"] > 1e-3
        seen = counters(server)
        assert value(seen, NAME, result="failed") == 1
        assert value(seen, "emberline:logprob_audit_max_abs_diff") == now["max_abs_diff"]
        server.alive()
    line, *_ = [r.getMessage() for r in caplog.records if r.name == live_audit.__name__]
    told = strict(line.split(": ", 1)[1])
    [choice] = answer["choices"]
    assert told["prompt_token_ids"] == choice["prompt_token_ids"]
    assert told["output_token_ids"] == choice["token_ids"]
    assert told["params"] == {"seed": 7, "top_p": 0.9, "max_tokens": 20}
    assert 0 <= told["position"] < len(choice["token_ids"])
    assert told["emitted"] != told["rescored"]
    assert told["rescored"] is not None
    assert told["max_abs_diff"] == now["max_abs_diff"]


def test_a_tolerance_of_ones_own(monkeypatch):
    score = outcome_module.score_emitted
    less = FAULTS["a little"]
    monkeypatch.setattr(
        outcome_module,
        "score_emitted",
        lambda *step: [run and tuple(less(run)) for run in score(*step)],
    )
    with audited(tolerance=0.1) as server:
        server.complete("Sun")
        now = settled(server, 1)
        assert (now["passed"], now["tolerance"]) == (1, 0.1)
        assert now["max_abs_diff"] == pytest.approx(0.01, abs=1e-5)


def test_it_waits_while_calls_are_there_and_gives_way_to_new_ones(monkeypatch):
    steps = []
    forward = SayingTarget.forward

    def noting(self, batch):
        steps.append(len(batch.seq_lens))
        return forward(self, batch)

    monkeypatch.setattr(SayingTarget, "forward", noting)
    monkeypatch.setattr(live_audit, "QUIET_SECONDS", 0.3)
    with audited(max_model_len=512) as server, ThreadPoolExecutor() as pool:
        server.complete("Sun" * 10, max_tokens=400)  # several steps to rescore
        server.target.delay = 0.05
        busy = pool.submit(server.complete, "Sun", max_tokens=16, speculate=False)
        time.sleep(0.5)
        assert not busy.done()
        assert set(steps) == {1}
        assert info(server)["passed"] == 0
        busy.result()
        # Now it begins; a call that comes makes it give up within a step, to begin again later.
        server.until(lambda now: now.num_running == 1)
        server.complete("Sun", max_tokens=1)
        assert info(server)["passed"] == 0
        server.target.delay = 0.0
        now = settled(server, 3)
        assert now["passed"] == 3
        assert max(steps) <= 2
        server.rest()


def test_an_end_in_the_middle_of_a_rescoring_leaves_nothing(caplog):
    with audited(max_model_len=512) as server:
        server.complete("Sun" * 10, max_tokens=400)
        server.target.delay = 0.1
        server.until(lambda now: now.num_running == 1)
    assert not server.engine._thread.is_alive()
    assert not server.engine._streams
    assert not caplog.records


def test_a_drain_does_not_wait_for_the_backlog():
    with audited(delay=0.05) as server:
        for _ in range(5):
            server.complete("Sun", max_tokens=3)
        server.process.handle_exit(15, None)
        began = time.monotonic()
        while server.engine._thread.is_alive():
            assert time.monotonic() - began < 5
            time.sleep(0.01)


def test_requests_that_broke_or_were_left_are_not_audited():
    with audited() as server:
        server.target.overrides[tuple(server.ids("xy"))] = (
            server.target.logits_after([9]) * math.nan
        )
        assert server.post("/v1/completions", {"prompt": "xy"}).status_code == 500
        server.target.delay = 0.05
        with pytest.raises(Exception, match="timed out"):
            server.post("/v1/completions", {"prompt": "Sun", "max_tokens": 200}, timeout=0.3)
        server.rest()
        server.target.delay = 0.0
        server.complete("Sun", max_tokens=3)
        assert settled(server, 1)["passed"] == 1
        time.sleep(0.1)
        now = info(server)
        assert (now["passed"], now["backlog"]) == (1, 0)


def test_a_rescoring_that_breaks_is_an_error(caplog, monkeypatch):
    monkeypatch.setattr(live_audit, "QUIET_SECONDS", 0.3)  # to break the model meanwhile
    with audited() as server:
        answer = server.complete("Sun", max_tokens=2, return_token_ids=True)["choices"][0]
        ids = answer["prompt_token_ids"] + answer["token_ids"]
        server.target.overrides[tuple(ids)] = server.target.logits_after([9]) * math.nan
        assert settled(server, 1)["error"] == 1
        server.alive()
    assert any("could not rescore" in r.getMessage() for r in caplog.records)


class Idle:
    """An engine that nobody runs."""

    def snapshot(self):
        return EngineSnapshot()


def make_audit(rate=1.0):
    metrics = AuditMetrics(CollectorRegistry(), {"model_name": "tiny", "engine": "0"})
    return LiveAudit(Idle(), rate, 1e-4, metrics)


def test_the_backlog_is_bounded_and_keeps_the_latest():
    audit = make_audit()
    for i in range(live_audit.MAX_BACKLOG + 7):
        watch = audit.watch([Request(f"{i}", (1,), SamplingParams(max_tokens=1))])
        watch.take(
            0,
            RequestOutput(
                f"{i}",
                token_ids=(2,),
                logprobs=(TokenLogprobs(2, -1.0, 1),),
                finish_reason=FinishReason.LENGTH,
            ),
        )
        watch.close()
    assert audit.info()["dropped"] == 7
    assert audit.info()["backlog"] == live_audit.MAX_BACKLOG
    assert audit._backlog[0].request.request_id == "7"


def test_an_error_of_the_audit_itself_does_not_end_it(monkeypatch, caplog):
    def broken(*_):
        raise ValueError("no")

    with audited() as server:
        with monkeypatch.context() as patched:
            patched.setattr(live_audit, "compare", broken)
            server.complete("Sun")
            assert settled(server, 1)["error"] == 1
        server.complete("Sun")
        assert settled(server, 2)["passed"] == 1
    assert any("could not rescore" in r.getMessage() for r in caplog.records)


def test_infinite_values_compare_as_the_floor():
    params = SamplingParams(
        max_tokens=3, logit_bias={4: 1.0}, stop=["x"], grammar=Grammar("regex", "a*")
    )
    finished = Finished(Request("r", (5,), params), (6, 7, 8), (-math.inf, -1.0, -math.inf))
    records = [None, *(TokenLogprobs(i, v, 1) for i, v in ((6, -math.inf), (7, -1.0), (8, -2.0)))]
    comparison = compare(finished, records)
    assert comparison.abs_diffs == (0.0, 0.0, 9997.0)
    told = strict(reproduction(finished, comparison, 1e-4))
    assert told["position"] == 2
    assert (told["emitted"], told["rescored"]) == (-9999.0, -2.0)
    assert told["params"] == {
        "max_tokens": 3,
        "logit_bias": {"4": 1.0},
        "stop": ["x"],
        "grammar": asdict(Grammar("regex", "a*")),
    }


def test_tolerances_follow_the_dtype():
    assert default_tolerance({"dtype": "float32"}) == 1e-4
    assert default_tolerance({"dtype": "bfloat16"}) > 0.01
