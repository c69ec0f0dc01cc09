"""What stands around the answers: models, health, metrics, tokenising, what the server says."""

from __future__ import annotations

import inspect

import openai
from prometheus_client.parser import text_string_to_metric_families

from emberline.engine.async_engine import AsyncEngine
from emberline.engine.detokenizer import TokenText
from emberline.server.app import create_app
from emberline.server.metrics import ServerMetrics
from emberline.types import EngineSnapshot

from support.engines import make_engine
from support.serving import NAME, SayingTarget, Server, make_tokenizer, say, strict


def counters(server: Server) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == NAME
            assert sample.labels["engine"] == "0"
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name + (str(sorted(rest.items())) if rest else "")
            found[key] = sample.value
    return found


def test_metrics_count_exactly(server: Server) -> None:
    server.rest()
    before = counters(server)
    answer = server.complete(say("a long enough answer"), max_tokens=30, logprobs=1)
    server.rest()
    after = counters(server)

    def added(name: str) -> float:
        return after[name] - before.get(name, 0)

    stats, usage = answer["emberline"]["speculation"], answer["usage"]
    assert added("vllm:spec_decode_num_drafts_total") == stats["steps"]
    assert added("sglang:spec_verify_calls_total") == stats["steps"]
    assert added("vllm:spec_decode_num_draft_tokens_total") == stats["verified"]
    assert added("vllm:spec_decode_num_accepted_tokens_total") == stats["accepted"]
    for position, count in enumerate(stats["accepted_per_position"]):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert added(f"{name}[('position', '{position}')]") == count
    assert added("emberline:verify_emitted_tokens_total") == stats["emitted"]
    assert added("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert added("vllm:generation_tokens_total") == usage["completion_tokens"]
    assert added("vllm:request_success_total[('finished_reason', 'stop')]") == 1
    assert added("vllm:time_to_first_token_seconds_count") == 1
    assert added("vllm:e2e_request_latency_seconds_count") == 1
    # Tokens that reach the server together with the first one have no latency of their own.
    assert 0 < added("vllm:inter_token_latency_seconds_count") <= usage["completion_tokens"] - 1
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_tokens_a_step_are_exact_where_a_stop_ends_a_block(server: Server) -> None:
    server.rest()
    before = counters(server)
    server.complete("free", max_tokens=2, ignore_eos=True)  # the second token ends a whole block
    server.rest()
    after = counters(server)
    emitted, steps = (
        after[name] - before[name]
        for name in ("emberline:verify_emitted_tokens_total", "vllm:spec_decode_num_drafts_total")
    )
    assert (emitted, steps) == (1, 1)


def test_models_health_version_and_info(server: Server, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == (NAME, "model")
    assert model.model_extra["max_model_len"] == 256
    assert client.models.retrieve(NAME).id == NAME
    health = server.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    head = server.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert strict(server.get("/version").content)["version"]
    info = strict(server.get("/server_info").content)
    assert (info["model"], info["max_model_len"], info["vocab_size"]) == (NAME, 256, 270)


def test_the_api_description_names_every_field(server: Server) -> None:
    paths = strict(server.get("/openapi.json").content)["paths"]
    for path, field in (("/v1/completions", "echo"), ("/v1/chat/completions", "top_logprobs")):
        content = paths[path]["post"]["requestBody"]["content"]
        assert field in content["application/json"]["schema"]["properties"]


def test_tokenize_in_both_dialects(server: Server) -> None:
    ids = server.ids("Sunny <eos>")
    answer = server.post("/tokenize", {"prompt": "Sunny <eos>", "return_token_strs": True}).json()
    assert answer == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": ["Sun", "ny", " ", "<eos>"],
    }
    assert server.post("/tokenize", {"content": "Sunny <eos>"}).json()["tokens"] == ids
    pieces = server.post("/tokenize", {"content": "ab", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["a", "b"]
    messages = [{"role": "user", "content": "ab"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert server.text.text_of(tokens) == "<user>ab<assistant>"
    refusal = server.post("/tokenize", {})
    assert refusal.status_code == 400
    assert refusal.json()["error"]["code"] == "invalid_value"
    assert server.post("/tokenize", {"prompt": "a", "content": "b"}).status_code == 400
    long = server.post("/tokenize", {"prompt": "a " * 5000}).json()  # off the event loop
    assert long["count"] == 10_000


def test_detokenize_is_the_inverse(server: Server) -> None:
    text = "Sunny 🙂<eos> \n\n"
    answer = server.post("/detokenize", {"tokens": server.ids(text)}).json()
    assert answer == {"prompt": text, "content": text}
    assert server.post("/detokenize", {"tokens": [270]}).status_code == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400
    assert server.post("/detokenize", {"tokens": []}).json()["prompt"] == ""


def test_tokenizer_info(server: Server) -> None:
    info = strict(server.get("/tokenizer_info").content)
    assert (info["eos_token"], info["model_max_length"]) == ("<eos>", 256)
    assert "assistant" in info["chat_template"]


def test_times_of_tokens_are_counted_a_token_each() -> None:
    """Tokens that came together share their time; a time on a limit belongs to its bucket."""
    metrics = ServerMetrics(EngineSnapshot, "m")
    for seconds, count in ((0.005, 3), (0.3, 2), (1000.0, 1)):
        metrics.inter_token.observe(seconds, count)
    labels = 'engine="0",{}model_name="m"'
    name = "vllm:inter_token_latency_seconds"
    shown = metrics.exposition().decode()
    for limit, total in (("0.005", 3), ("0.25", 3), ("0.5", 5), ("300.0", 5), ("+Inf", 6)):
        within = labels.format(f'le="{limit}",')
        assert f"{name}_bucket{{{within}}} {total}.0\n" in shown
    assert f"{name}_count{{{labels.format('')}}} 6.0\n" in shown
    assert f"{name}_sum{{{labels.format('')}}} 1000.615\n" in shown


def test_no_get_waits_for_a_thread() -> None:
    """Prompts and answers may keep every thread busy; health and metrics are asked all the same."""
    target = SayingTarget(make_tokenizer())
    engine = AsyncEngine(make_engine(target), TokenText(make_tokenizer()))
    try:
        app = create_app(engine, make_tokenizer(), NAME)
    finally:
        engine.shutdown()
    gets = [route for route in app.routes if "GET" in getattr(route, "methods", ())]
    assert len(gets) >= 7
    for route in gets:
        assert inspect.iscoroutinefunction(route.endpoint), route.path
