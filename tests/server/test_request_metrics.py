"""The `metrics` object: figures that reconcile, on answers of one choice, where they are wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from emberline.server.metrics import RequestTimes
from emberline.server.request_metrics import request_metrics
from emberline.types import RequestOutput, SpeculationStats

from support.serving import Server, say, saying_server, strict

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIMES = {
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
    "tokens_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def telling() -> Iterator[Server]:
    """A server that tells unless asked not to."""
    options = {"per_request_metrics": "summary"}
    with saying_server(num_drafts=4, wrong_every=3, options=options) as server:
        yield server


def body(path: str, **options: Any) -> dict[str, Any]:
    asked = {"max_tokens": 20, "ignore_eos": True, **options}
    if path == COMPLETIONS:
        return {"prompt": "free", **asked}
    return {"messages": [{"role": "user", "content": "hi"}], **asked}


def answer(server: Server, path: str, **options: Any) -> dict[str, Any]:
    got = server.post(path, body(path, **options))
    assert got.status_code == 200, got.text
    return strict(got.content)


def check_speculation(got: dict[str, Any], stats: dict[str, Any], width: int) -> None:
    """What clients of this object check, and that it says what the answer says elsewhere."""
    histogram = got["acceptance_histogram"]
    assert len(histogram) == got["num_spec_tokens"] + 1 == width + 1
    assert sum(histogram) == got["num_spec_steps"] == stats["steps"]
    accepted = sum(length * steps for length, steps in enumerate(histogram))
    assert accepted == got["num_accepted_draft_tokens"] == stats["accepted"]
    assert got["num_draft_tokens"] == stats["verified"]
    assert got["mean_acceptance_length"] == 1 + accepted / got["num_spec_steps"]
    assert got["draft_acceptance_rate"] == stats["acceptance_rate"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_figures_reconcile(server: Server, path: str) -> None:
    got = answer(server, path, per_request_metrics="summary")
    metrics, stats = got["metrics"], got["emberline"]["speculation"]
    width = server.engine.max_draft_tokens
    if width:
        check_speculation(metrics.pop("speculative_decoding"), stats, width)
    assert set(metrics) == TIMES  # without a drafter nothing is said of one
    assert all(value >= 0 for value in metrics.values())
    assert metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
    spent = metrics["generation_time_ms"]
    assert metrics["mean_itl_ms"] == pytest.approx(spent / 19)
    assert metrics["tokens_per_second"] == pytest.approx(19_000 / spent)


def test_answers_say_nothing_of_it_unless_asked(server: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        assert "metrics" not in answer(server, path)
        assert "metrics" not in answer(server, path, per_request_metrics="none")
        assert "metrics" not in server.stream(path, body(path))[-1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_server_may_tell_by_itself(telling: Server, path: str) -> None:
    got = answer(telling, path)
    check_speculation(
        got["metrics"]["speculative_decoding"], got["emberline"]["speculation"], width=4
    )
    assert "metrics" not in answer(telling, path, per_request_metrics="none")
    assert "metrics" not in answer(telling, path, n=2)
    assert telling.get("/server_info").json()["per_request_metrics"] == "summary"


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_tells_at_its_end(telling: Server, path: str, usage: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    *before, last = telling.stream(path, body(path, **more))
    assert all("metrics" not in event for event in before)
    assert ("usage" in last) == (last["choices"] == []) == usage
    spoken = last["metrics"]["speculative_decoding"]
    check_speculation(spoken, last["emberline"]["speculation"], width=4)
    assert last["metrics"]["generation_time_ms"] > 0


def test_several_choices_have_no_request_to_tell_of(server: Server) -> None:
    for path, more in (
        (CHAT, {"n": 2}),
        (COMPLETIONS, {"n": 2}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
    ):
        got = server.post(path, body(path, **more) | {"per_request_metrics": "summary"})
        assert got.status_code == 400
        assert got.json()["error"]["param"] == "per_request_metrics"
    got = server.post(CHAT, body(CHAT, per_request_metrics="detailed"))
    assert got.json()["error"]["param"] == "per_request_metrics"


def test_the_wait_in_the_queue_is_told() -> None:
    options = {"per_request_metrics": "summary"}
    with saying_server(delay=0.02, max_num_reqs=1, options=options) as server:
        first = threading.Thread(target=answer, args=(server, COMPLETIONS))
        first.start()
        server.until(lambda now: now.num_running == 1)
        metrics = answer(server, COMPLETIONS, max_tokens=1)["metrics"]
        first.join()
    assert metrics["queue_time_ms"] > 50
    assert metrics["time_to_first_token_ms"] > metrics["queue_time_ms"]
    assert (metrics["mean_itl_ms"], metrics["tokens_per_second"]) == (None, None)
    assert metrics["generation_time_ms"] == 0


def test_a_request_that_never_ran_has_no_times() -> None:
    options = {"per_request_metrics": "summary"}
    with saying_server(delay=0.02, max_num_reqs=1, options=options) as server:
        first = threading.Thread(target=answer, args=(server, COMPLETIONS))
        first.start()
        server.until(lambda now: now.num_running == 1)
        got = answer(server, COMPLETIONS, timeout=0.05)
        first.join()
    assert got["choices"][0]["finish_reason"] == "abort"
    assert got["metrics"]["time_to_first_token_ms"] is None
    assert got["metrics"]["generation_time_ms"] is None
    assert got["metrics"]["queue_time_ms"] >= 50


def test_a_stop_inside_a_block_counts_what_was_kept(telling: Server) -> None:
    got = strict(telling.post(COMPLETIONS, {"prompt": say("abcdefgh"), "stop": "cd"}).content)
    check_speculation(
        got["metrics"]["speculative_decoding"], got["emberline"]["speculation"], width=4
    )


def test_longer_blocks_than_the_drafters_widen_the_histogram() -> None:
    stats = SpeculationStats({(15, 15, 12, 13, False): 1, (0, 0, 0, 1, False): 1})
    last = RequestOutput("r", num_output_tokens=15, stats=stats)
    got = request_metrics(RequestTimes(0.1, 0.5), last, 7)["speculative_decoding"]
    assert got["num_spec_tokens"] == 15
    assert len(got["acceptance_histogram"]) == 16
    assert got["acceptance_histogram"][12] == got["acceptance_histogram"][0] == 1


def test_before_the_first_step_there_are_no_means() -> None:
    got = request_metrics(RequestTimes(), RequestOutput("r"), 3)
    assert got["speculative_decoding"] == {
        "mean_acceptance_length": None,
        "draft_acceptance_rate": None,
        "acceptance_histogram": [0, 0, 0, 0],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": 3,
    }
