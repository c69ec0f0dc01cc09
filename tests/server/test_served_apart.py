"""The most telling tests of the server, once more over an engine in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from test_chat import (  # noqa: F401
    test_how_the_call_was_speculated_is_told,
    test_one_record_a_token_and_bytes_join_to_the_text,
)
from test_completions import (  # noqa: F401
    test_a_batch_answers_as_its_prompts_alone,
    test_echo_scores_the_prompt_and_offsets_rebuild_the_text,
    test_prompt_logprobs_from_a_start,
)
from test_disconnect import (  # noqa: F401
    test_a_slow_reader_delays_nobody_and_loses_nothing,
    test_hanging_up_before_the_body_is_sent,
    test_hanging_up_frees_every_choice_and_the_waiting,
    test_hanging_up_stops_the_generation,
    test_stop_button_and_a_new_turn,
)
from test_extras import (  # noqa: F401
    test_annotations_agree_with_the_counts,
    test_chat_has_both_distributions_in_one_entry,
    test_minus_one_is_the_whole_vocabulary,
    test_what_could_not_be_drawn_is_finite_there,
)
from test_native import (  # noqa: F401
    test_a_name_in_use_is_refused_and_free_afterwards,
    test_a_stream_says_everything_so_far,
    test_an_abort_reaches_one_sequence_or_all_of_a_call,
    test_an_aborted_call_answers_with_what_it_has,
    test_health_model_and_server,
    test_spec_fields_add_up,
    test_the_cache_is_flushed,
)
from test_refusals import (  # noqa: F401
    test_a_refused_call_leaves_its_neighbours_alone,
    test_lengths_at_the_context_limit,
    test_the_server_lives_on,
)
from test_request_metrics import test_the_figures_reconcile  # noqa: F401
from test_streaming import (  # noqa: F401
    test_a_joined_chat_stream_is_the_whole_answer,
    test_answers_are_the_same_side_by_side,
    test_choices_of_a_stream_end_each_once,
    test_continuous_usage,
    test_prompt_ids_and_logprobs_come_first,
    test_the_train_of_chunks,
)
from test_structured import (  # noqa: F401
    test_records_of_a_bound_answer,
    test_the_compiler_is_quoted_and_nothing_is_harmed,
    test_what_comes_is_what_was_asked_for,
)

from support.apart import saying_apart, server_apart
from support.serving import Server, strict


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with saying_apart(num_drafts=4, wrong_every=3) as engine, server_apart(engine) as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    with (
        saying_apart(num_drafts=2, delay=0.02, max_num_reqs=2) as engine,
        server_apart(engine) as running,
    ):
        yield running


def test_the_log_probabilities_are_audited_and_pass() -> None:
    with (
        saying_apart(num_drafts=4, wrong_every=3) as engine,
        server_apart(engine, verify_logprobs=1.0) as server,
    ):
        for more in ({}, {"logprobs": 3, "logprobs_mode": "both"}, {"stream": True, "n": 2}):
            body = {"prompt": "<say>Sunny days</say> and", "max_tokens": 24, **more}
            assert server.post("/v1/completions", body).status_code == 200
        end = time.monotonic() + 30
        while (now := strict(server.get("/server_info").content)["logprob_audit"])["passed"] < 4:
            assert time.monotonic() < end, now
            time.sleep(0.05)
        assert (now["failed"], now["error"], now["max_abs_diff"]) == (0, 0, 0.0)


def test_counters_are_those_of_the_process(server: Server) -> None:
    before = server.engine.snapshot()
    answer = server.complete("<say>Sunny day</say>", max_tokens=20)
    now = server.engine.snapshot()
    counted = now.generation_tokens - before.generation_tokens
    assert counted == answer["usage"]["completion_tokens"]
    name = 'vllm:generation_tokens_total{engine="0",model_name="tiny"}'
    assert f"{name} {now.generation_tokens:.1f}" in server.get("/metrics").text
    assert json.loads(server.get("/server_info").content)["model"] == "tiny"
