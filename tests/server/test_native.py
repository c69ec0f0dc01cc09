"""`POST /generate`: shapes, batches, names, stops, streams, and what stands round it."""

from __future__ import annotations

import json
import socket
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from support.serving import Server, say, saying_server, strict

PATH = "/generate"
GREEDY = {"temperature": 0}


def generate(server: Server, **body: Any) -> Any:
    options = {**GREEDY, **body.pop("sampling_params", {})}
    answer = server.post(PATH, {"sampling_params": options, **body})
    assert answer.status_code == 200, answer.text
    return strict(answer.content)


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    options = {**GREEDY, **body.pop("sampling_params", {})}
    return server.stream(PATH, {"sampling_params": options, **body})


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock, the calls before, or how it was speculated."""
    left_out = {"e2e_latency", "cached_tokens", "id", "emberline"}
    meta = {
        key: value
        for key, value in answer["meta_info"].items()
        if key not in left_out and not key.startswith("spec_")
    }
    return {**answer, "meta_info": meta}


def test_one_prompt_has_one_answer(server: Server) -> None:
    answer = generate(server, text=say("Sunny day"), rid="mine")
    meta = answer["meta_info"]
    eos = server.tokenizer.eos_token_id
    assert list(answer) == ["text", "output_ids", "meta_info"]
    assert answer["text"] == "Sunny day"
    assert answer["output_ids"] == [*server.ids("Sunny day"), eos]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": eos}
    assert meta["prompt_tokens"] == len(server.ids(say("Sunny day")))
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert (meta["reasoning_tokens"], meta["num_retractions"]) == (0, 0)
    assert meta["weight_version"] == "default"
    assert 0 < meta["e2e_latency"] < 60
    assert not any("logprobs" in key for key in meta)


def test_ids_are_a_prompt_too(server: Server) -> None:
    answer = generate(server, input_ids=server.ids(say("ok")))
    assert answer["text"] == "ok"


def test_128_tokens_unless_told_otherwise(server: Server) -> None:
    answer = generate(server, text="free")
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}
    assert len(answer["output_ids"]) == 128
    ids = server.ids("a" * 200)  # 256 is the context: what is left is what there is
    assert len(generate(server, input_ids=ids)["output_ids"]) == 56


def test_a_list_of_prompts_has_a_list_of_answers(server: Server) -> None:
    texts = ["one", "two", "three"]
    answers = generate(server, text=[say(text) for text in texts])
    assert [answer["text"] for answer in answers] == texts
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3
    ids = [server.ids(say(text)) for text in texts]
    assert [answer["text"] for answer in generate(server, input_ids=ids)] == texts
    [alone] = generate(server, text=[say("one")])
    assert alone["text"] == "one"


def test_choices_are_independent_and_repeat_with_a_seed(server: Server) -> None:
    options = {"n": 4, "temperature": 1.0, "seed": 5, "max_new_tokens": 8, "ignore_eos": True}
    first, again = (generate(server, text="free", sampling_params=options) for _ in range(2))
    texts = [answer["text"] for answer in first]
    assert len(set(texts)) == 4
    assert [answer["text"] for answer in again] == texts
    del options["seed"]
    alias = generate(server, text="free", sampling_params={**options, "sampling_seed": 5})
    assert [answer["text"] for answer in alias] == texts
    both = generate(server, text=["free", say("x")], sampling_params=options | {"n": 2})
    assert [answer["index"] for answer in both] == [0, 1, 2, 3]
    assert both[2]["text"].startswith("x")


def test_each_prompt_of_a_batch_has_its_own_options(server: Server) -> None:
    body = {
        "text": ["free", say("abc"), "free"],
        "sampling_params": [
            {**GREEDY, "max_new_tokens": 3},
            {**GREEDY, "stop": "c"},
            {**GREEDY, "max_new_tokens": 5, "ignore_eos": True},
        ],
        "return_logprob": [True, False, True],
        "logprob_start_len": [0, -1, -1],
        "top_logprobs_num": [2, 0, 0],
        "token_ids_logprob": [None, None, [5, 6, 7]],
        "rid": ["a", "b", "c"],
    }
    first, second, third = strict(server.post(PATH, body).content)
    assert [len(one["output_ids"]) for one in (first, third)] == [3, 5]
    assert (second["text"], second["meta_info"]["finish_reason"]["matched"]) == ("ab", "c")
    assert [one["meta_info"]["id"] for one in (first, second, third)] == ["a", "b", "c"]
    assert [len(top) for top in first["meta_info"]["output_top_logprobs"]] == [2] * 3
    assert "output_token_ids_logprobs" not in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]
    assert third["meta_info"]["input_token_logprobs"] == []
    chosen = third["meta_info"]["output_token_ids_logprobs"]
    assert [[entry[1] for entry in row] for row in chosen] == [[5, 6, 7]] * 5


@pytest.mark.parametrize("start", [0, 1, 4])
def test_logprobs_are_those_of_the_other_routes(server: Server, start: int) -> None:
    """Prompt and answer, chosen ids and alternatives: the very same floats."""
    prompt, ids = say("Sunny 🙂 days") + "fr", [3, 9]
    answer = generate(
        server,
        text=prompt,
        sampling_params={"max_new_tokens": 6},
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=3,
        token_ids_logprob=ids,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    [other] = server.complete(
        prompt, max_tokens=6, logprobs=3, echo=True, logprob_token_ids=ids, return_token_ids=True
    )["choices"]
    arrays, num_prompt = other["logprobs"], meta["prompt_tokens"]
    assert meta["prompt_tokens"] == start + len(meta["input_token_logprobs"])
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 6
    # The first reported position has no value, wherever it is.
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_token_ids_logprobs"][0] is None
    said = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    assert [one[0] for one in said] == arrays["token_logprobs"][start + 1 :]
    assert [one[1] for one in said] == arrays["token_ids"][start + 1 :]
    assert [one[2] for one in said] == arrays["tokens"][start + 1 :]
    tops = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
    for top, expected in zip(tops, arrays["top_logprobs"][start + 1 :], strict=True):
        assert len(top) == 3
        assert top == sorted(top, key=lambda entry: -entry[0])
        assert {entry[2]: entry[0] for entry in reversed(top)}.items() <= expected.items()
    chosen = [*meta["input_token_ids_logprobs"][1:], *meta["output_token_ids_logprobs"]]
    for row, expected in zip(chosen, arrays["token_id_logprobs"][start + 1 :], strict=True):
        assert {str(entry[1]): entry[0] for entry in row} == expected
    assert meta["input_token_logprobs"][-1][1] == server.ids(prompt)[num_prompt - 1]


def test_no_text_in_logprobs_unless_asked(server: Server) -> None:
    meta = generate(server, text=say("a"), return_logprob=True, top_logprobs_num=1)["meta_info"]
    assert all(entry[2] is None for entry in meta["output_token_logprobs"])
    assert all(entry[2] is None for [entry] in meta["output_top_logprobs"])


def test_at_the_end_of_the_prompt_nothing_is_left_to_report(server: Server) -> None:
    ids = server.ids("abcd")
    options = {"max_new_tokens": 1}
    for start, expected in ((3, [[None, ids[3], None]]), (4, []), (-1, [])):
        meta = generate(
            server,
            input_ids=ids,
            return_logprob=True,
            logprob_start_len=start,
            sampling_params=options,
        )["meta_info"]
        assert meta["input_token_logprobs"] == expected
        assert len(meta["output_token_logprobs"]) == 1


@pytest.mark.parametrize("more", [{}, {"return_logprob": True, "logprob_start_len": 0}])
def test_nothing_is_generated_when_only_scoring(server: Server, more: dict[str, Any]) -> None:
    for text in ("a", "abc"):
        answer = generate(server, text=text, sampling_params={"max_new_tokens": 0}, **more)
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        if more:
            assert len(meta["input_token_logprobs"]) == len(text)
            assert meta["output_token_logprobs"] == []


def test_stops_trim_the_text_and_nothing_else(server: Server) -> None:
    def stopped(**options: Any) -> tuple[str, Any, int]:
        answer = generate(server, text=say("one two"), sampling_params=options, return_logprob=True)
        meta = answer["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert len(answer["output_ids"]) == meta["completion_tokens"]
        return answer["text"], meta["finish_reason"]["matched"], meta["completion_tokens"]

    [letter] = server.ids("w")
    eos = server.tokenizer.eos_token_id
    assert stopped(stop=["tw"]) == ("one ", "tw", 6)
    assert stopped(stop=["tw"], no_stop_trim=True) == ("one tw", "tw", 6)
    assert stopped(stop_token_ids=[letter]) == ("one t", letter, 6)
    assert stopped(stop_token_ids=[letter], no_stop_trim=True) == ("one tw", letter, 6)
    assert stopped(skip_special_tokens=False) == ("one two", eos, 8)
    assert stopped(skip_special_tokens=False, no_stop_trim=True) == ("one two<eos>", eos, 8)
    assert stopped(stop="e", min_new_tokens=4) == ("one two", eos, 8)


@pytest.mark.parametrize("text", [say("Sunny 🙂 day"), "free"])
def test_a_stream_says_everything_so_far(server: Server, text: str) -> None:
    body = {
        "text": text,
        "sampling_params": {"max_new_tokens": 12, "stop": ["ay"]},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [1],
        "return_text_in_logprobs": True,
    }
    seen, whole = events(server, **body), generate(server, **body)
    for before, after in pairwise(seen):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in before["meta_info"]
        for key, array in before["meta_info"].items():
            if key.endswith("_logprobs"):
                assert after["meta_info"][key][: len(array)] == array
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(before["meta_info"]["output_token_logprobs"]) == len(before["output_ids"])
    assert timeless(seen[-1]) == timeless(whole)
    assert len({event["meta_info"]["id"] for event in seen}) == 1
    assert len(seen) <= 1 + seen[-1]["meta_info"].get("spec_verify_ct", 0)


def test_the_streams_of_a_batch_are_told_apart(server: Server) -> None:
    texts = [say("first"), say("second one"), "free"]
    body = {"text": texts, "sampling_params": {"max_new_tokens": 9}}
    seen, whole = events(server, **body), generate(server, **body)
    last = {event["index"]: event for event in seen}
    assert [timeless(last[index]) for index in range(3)] == list(map(timeless, whole))
    ended = [event for event in seen if event["meta_info"]["finish_reason"] is not None]
    assert sorted(event["index"] for event in ended) == [0, 1, 2]


def test_spec_fields_add_up(server: Server) -> None:
    answer = generate(
        server, text=say("a long enough answer"), sampling_params={"ignore_eos": False}
    )
    meta = answer["meta_info"]
    own = meta["emberline"]["speculation"]
    histogram = meta["spec_correct_drafts_histogram"]
    assert meta["spec_verify_ct"] == own["steps"] == sum(histogram)
    assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]
    assert meta["spec_num_correct_drafts"] == sum(i * count for i, count in enumerate(histogram))
    assert meta["spec_num_correct_drafts"] == own["accepted"] == meta["spec_accepted_drafts"]
    assert meta["spec_num_proposed_drafts"] == own["drafted"] == meta["spec_proposed_drafts"]
    assert meta["spec_accept_histogram"] == histogram
    assert meta["spec_cap_length"] == 1 + own["verified"] / own["steps"]
    expected = own["accepted"] / own["drafted"] if own["drafted"] else 0.0
    assert meta["spec_accept_rate"] == expected
    # Where nothing was verified nothing is said.
    assert (
        "spec_verify_ct"
        not in generate(server, text="x", sampling_params={"max_new_tokens": 1})["meta_info"]
    )


def test_speculation_can_be_switched_off(server: Server) -> None:
    for where in ({"speculate": False}, {"sampling_params": {"speculate": False}}):
        meta = generate(server, text=say("not drafted"), **where)["meta_info"]
        assert meta["spec_num_proposed_drafts"] == 0
        assert meta["spec_verify_ct"] == meta["completion_tokens"] - 1


def test_both_distributions_and_annotations(server: Server) -> None:
    options = {"max_new_tokens": 6, "logit_bias": {"9": 3.0}, "temperature": 0.7, "seed": 2}
    meta = generate(
        server,
        text="free",
        sampling_params=options,
        return_logprob=True,
        top_logprobs_num=2,
        token_ids_logprob=[9],
        logprobs_mode="both",
        annotations=True,
    )["meta_info"]
    raw = generate(
        server, text="free", sampling_params=options, return_logprob=True, top_logprobs_num=2
    )["meta_info"]
    processed = generate(
        server,
        text="free",
        sampling_params={**options, "logprobs_mode": "processed"},
        return_logprob=True,
        top_logprobs_num=2,
    )["meta_info"]
    for kind in ("token", "top"):
        assert meta[f"output_{kind}_logprobs"] == raw[f"output_{kind}_logprobs"]
        twin = f"processed_output_{kind}_logprobs"
        assert meta[twin] == processed[f"output_{kind}_logprobs"]
        assert meta[twin] != raw[f"output_{kind}_logprobs"]
    assert len(meta["processed_output_token_ids_logprobs"]) == 6
    notes = meta["output_annotations"]
    assert len(notes) == 6
    assert {"step", "origin", "draft_token_id", "draft_token", "confidence"} == set(notes[0])
    assert notes[0]["origin"] == "decoded"
    steps = [note["step"] for note in notes]
    assert steps == sorted(steps)
    assert "output_annotations" not in raw


def test_a_priority_is_higher_the_sooner() -> None:
    with saying_server(max_num_reqs=1, delay=0.02) as server:
        order: list[str] = []

        def ask(name: str, priority: int) -> None:
            generate(server, text="free", sampling_params={"max_new_tokens": 5}, priority=priority)
            order.append(name)

        threads = [threading.Thread(target=ask, args=("first", 0))]
        threads[0].start()
        server.until(lambda now: now.num_running == 1)
        for count, (name, priority) in enumerate([("low", -5), ("high", 5)], 1):
            threads.append(threading.Thread(target=ask, args=(name, priority)))
            threads[-1].start()
            server.until(lambda now, count=count: now.num_waiting == count)
        for thread in threads:
            thread.join()
        assert order == ["first", "high", "low"]


def test_a_call_out_of_time_answers_with_what_it_has() -> None:
    with saying_server(delay=0.05) as server:
        answer = generate(
            server,
            text="free",
            timeout=0.4,
            return_logprob=True,
            sampling_params={"ignore_eos": True},
        )
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "timeout"}
        assert 0 < meta["completion_tokens"] < 128
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        server.alive()


@pytest.fixture(scope="module")
def slow() -> Any:
    with saying_server(delay=0.03, num_drafts=2) as running:
        yield running
        running.alive()


def start(server: Server, **body: Any) -> tuple[threading.Thread, list[Any]]:
    """A call in the background, and where its answer will be; returns once it runs."""
    answers: list[Any] = []
    options = {"sampling_params": {"ignore_eos": True, "max_new_tokens": 200}}
    ask = threading.Thread(target=lambda: answers.append(generate(server, **options | body)))
    server.rest()
    ask.start()
    server.until(lambda now: now.num_running > 0 and now.generation_tokens > 0)
    return ask, answers


@pytest.mark.parametrize(
    "how", [{"rid": "one"}, {"abort_all": True}, {"rid": "", "abort_all": True}]
)
def test_an_aborted_call_answers_with_what_it_has(slow: Server, how: dict[str, Any]) -> None:
    thread, answers = start(slow, text="free", rid="one")
    assert slow.post("/abort_request", {"rid": "another"}).status_code == 200
    assert slow.post("/abort_request", how).status_code == 200
    thread.join(5)
    [answer] = answers
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted"}
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) < 200
    slow.rest()


def test_an_abort_reaches_one_sequence_or_all_of_a_call(slow: Server) -> None:
    thread, answers = start(slow, text=["free", "freely"], rid="both")
    assert slow.post("/abort_request", {"rid": "both_1"}).status_code == 200
    slow.until(lambda now: now.num_running == 1)
    assert slow.post("/abort_request", {"rid": "both"}).status_code == 200
    thread.join(5)
    [first, second] = answers[0]
    assert [one["meta_info"]["id"] for one in (first, second)] == ["both_0", "both_1"]
    assert len(second["output_ids"]) < len(first["output_ids"]) < 200
    slow.rest()


def test_an_abort_leaves_other_routes_alone(slow: Server) -> None:
    answers: list[Any] = []
    body = {"max_tokens": 40, "ignore_eos": True}
    ask = threading.Thread(target=lambda: answers.append(slow.complete("free", **body)))
    slow.rest()
    ask.start()
    slow.until(lambda now: now.num_running == 1)
    assert slow.post("/abort_request", {"abort_all": True}).status_code == 200
    ask.join(10)
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    refusal = slow.post("/abort_request", {})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "rid")


def test_a_name_in_use_is_refused_and_free_afterwards(slow: Server) -> None:
    thread, _ = start(slow, text="free", rid="mine")
    refusal = slow.post(PATH, {"text": "x", "rid": "mine"})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "rid")
    slow.post("/abort_request", {"rid": "mine"})
    thread.join(5)
    answer = generate(slow, text=say("ok"), rid="mine")
    assert (answer["text"], answer["meta_info"]["id"]) == ("ok", "mine")


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_leaves_nothing_behind(slow: Server, stream: bool) -> None:
    body = {"text": ["free", "x"], "rid": "gone", "stream": stream}
    body["sampling_params"] = {"ignore_eos": True, "max_new_tokens": 200}
    content = json.dumps(body).encode()
    slow.rest()
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        slow.until(lambda now: now.num_running == 2)
    slow.rest()
    deadline = time.monotonic() + 5
    while slow.post(
        PATH, {**body, "stream": False, "sampling_params": {"max_new_tokens": 1}}
    ).is_error:
        assert time.monotonic() < deadline


def test_the_cache_is_flushed(server: Server) -> None:
    ids = server.ids("a prompt of more than a page, told at length" * 2)

    def cached() -> int:
        answer = generate(server, input_ids=ids, sampling_params={"max_new_tokens": 1})
        return answer["meta_info"]["cached_tokens"]

    cached()
    assert cached() > 0
    for method in ("GET", "POST"):
        assert server.http.request(method, "/flush_cache").status_code == 200
        server.until(lambda now: now.num_cached_pages_share == 0)
        assert cached() == 0
        assert cached() > 0


def test_health_model_and_server(server: Server) -> None:
    before = server.engine.snapshot().generation_tokens
    answer = server.get("/health_generate")
    assert (answer.status_code, answer.content) == (200, b"")
    assert server.engine.snapshot().generation_tokens == before + 1
    model = strict(server.get("/get_model_info").content)
    assert model["model_path"]
    assert (model["is_generation"], model["weight_version"]) == (True, "default")
    generate(server, text=say("a few tokens"))
    for path in ("/get_server_info", "/server_info"):
        info = strict(server.get(path).content)
        assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    schema = strict(server.get("/openapi.json").content)["paths"]
    assert "/generate" in schema
    assert "/flush_cache" in schema
