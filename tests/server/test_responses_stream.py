"""Events of a response: their order and shapes, and that they add up to the whole response."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from support.engines import make_engine
from support.responding import LOGPROBS, URL, bare, of, parse, stream, timeless
from support.serving import (
    NAME,
    SayingTarget,
    Server,
    make_tokenizer,
    say,
    saying_server,
    serve,
)


def test_the_train_of_events(server: Server) -> None:
    events = stream(server, say("hello"))
    kinds = [event["type"].removeprefix("response.") for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[:4] == opening
    assert kinds[-4:] == closing
    assert set(kinds[4:-4]) == {"output_text.delta"}
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert last["status"] == "completed"
    [item] = last["output"]
    assert events[-2]["item"] == item
    assert events[-3]["part"] == item["content"][0]
    places = {(e["item_id"], e["output_index"], e["content_index"]) for e in events[3:-2]}
    assert places == {(item["id"], 0, 0)}
    # An event a step: all its tokens together.
    assert len(kinds) - 8 <= 1 + last["emberline"]["speculation"]["steps"]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": [", t", "o"]},
    "limit": {"max_output_tokens": 4},
    "ids": {"return_token_ids": True, "return_tokens_as_token_ids": True},
    "specials": {"skip_special_tokens": False},
    "both": {"logprobs_mode": "both", "annotations": True},
}


@pytest.mark.parametrize("text", ["one, two", "🙂a你", ""])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_a_stream_adds_up_to_the_response(server: Server, text: str, option: str) -> None:
    options = {"include": [LOGPROBS], "top_logprobs": 2, **OPTIONS[option]}
    whole = server.post(URL, {"input": say(text), "temperature": 0, **options}).json()
    events = stream(server, say(text), **options)
    last = events[-1]["response"]
    assert timeless(last) == timeless(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    [part] = whole["output"][0]["content"]
    deltas, [done] = of(events, "output_text.delta"), of(events, "output_text.done")
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == part["text"]
    joined = [entry for delta in deltas for entry in delta["logprobs"]]
    assert joined == done["logprobs"]
    assert '"bytes"' not in str(joined).replace("'", '"')
    if option != "both":
        assert joined == bare(part["logprobs"])
    assert len(joined) == whole["usage"]["output_tokens"]


def test_no_records_unless_included(server: Server) -> None:
    events = stream(server, say("🙂"))
    assert all(
        delta["delta"] and delta["logprobs"] == [] for delta in of(events, "output_text.delta")
    )
    assert of(events, "output_text.done")[0]["logprobs"] == []


def test_the_official_client_adds_up_the_same(client: openai.OpenAI) -> None:
    with client.responses.stream(model=NAME, input=say("hello"), temperature=0) as events:
        snapshots = [event.snapshot for event in events if event.type.endswith("text.delta")]
        final = events.get_final_response()
    assert snapshots[-1] == final.output_text == "hello"
    assert final.status == "completed"


def test_what_is_streamed_is_kept_before_it_is_told(server: Server) -> None:
    last = stream(server, say("one"))[-1]["response"]
    assert server.get(f"{URL}/{last['id']}").json() == last
    events = stream(server, say("two"), previous_response_id=last["id"], return_token_ids=True)
    shown = server.text.text_of(events[-1]["response"]["prompt_token_ids"])
    assert shown == "<user><say>one</say><assistant>one<user><say>two</say><assistant>"


def test_a_stream_out_of_time() -> None:
    with saying_server(num_drafts=3, delay=0.05) as slow:
        options = {"ignore_eos": True, "max_output_tokens": 200, "timeout": 0.4}
        events = stream(slow, "free", include=[LOGPROBS], **options)
        last = events[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["emberline"]["stop_reason"] == "timeout"
        slow.alive()


def test_a_client_that_hangs_up_leaves_nothing() -> None:
    with saying_server(delay=0.02) as slow:
        body = {"input": "free", "stream": True, "ignore_eos": True, "max_output_tokens": 200}
        with slow.http.stream("POST", URL, json=body) as answer:
            line = next(answer.iter_lines())
            assert line == "event: response.created"
        slow.rest(1.0)
        before = slow.engine.snapshot().generation_tokens
        with pytest.raises(Exception, match="timed out"):
            slow.http.post(URL, json={**body, "stream": False}, timeout=0.3)
        slow.rest(1.0)
        assert slow.engine.snapshot().generation_tokens - before < 100
        slow.alive()


def test_what_fails_before_the_first_event_is_an_ordinary_error() -> None:
    tokenizer = make_tokenizer()
    target = SayingTarget(tokenizer)
    bad = tuple(tokenizer("<user>bad<assistant>")["input_ids"])
    target.overrides[bad] = torch.full((target.vocab_size,), float("nan"))
    engine = make_engine(target, num_pages=1024, eos_ids=(target.eos,))
    with serve(engine, tokenizer, target) as server:
        answer = server.post(URL, {"input": "bad", "stream": True})
        assert answer.status_code == 500
        assert "NaN" in answer.json()["error"]["message"]
        server.alive()


def test_what_fails_later_is_an_event() -> None:
    tokenizer = make_tokenizer()
    target = SayingTarget(tokenizer)
    bad = tuple(tokenizer("<user><say>abc</say><assistant>ab")["input_ids"])
    target.overrides[bad] = torch.full((target.vocab_size,), float("nan"))
    engine = make_engine(target, num_pages=1024, eos_ids=(target.eos,))
    with serve(engine, tokenizer, target) as server:
        events = stream(server, say("abc"))
        last = events[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert "NaN" in last["response"]["error"]["message"]
        assert server.get(f"{URL}/{last['response']['id']}").status_code == 404
        server.alive()


def test_the_end_of_the_server_is_told() -> None:
    body = {"input": "free", "ignore_eos": True, "max_output_tokens": 200, "stream": True}
    options = {"grace_seconds": 0.2}
    with saying_server(delay=0.05, options=options) as slow, ThreadPoolExecutor() as pool:
        asked = pool.submit(slow.post, URL, body)
        slow.until(lambda now: now.generation_tokens > 2)
        slow.process.handle_exit(signal.SIGTERM, None)
        time.sleep(0.1)
        assert slow.post(URL, {"input": "x"}).json()["error"]["code"] == "shutting_down"
        last = parse(asked.result(10).text)[-1]
        assert last["type"] == "response.failed"
        assert "shut down" in last["response"]["error"]["message"]
