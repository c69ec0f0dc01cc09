"""`emberline bench serve` as a user runs it, on a real server of ours and on others' shapes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from emberline.cli import make_app

from support.fake_server import (
    DONE,
    Asked,
    Reply,
    chat_chunk,
    event,
    fake_server,
    json_reply,
    models,
    usage_chunk,
)
from support.serving import Server, make_tokenizer, saying_server

NUM_DRAFTS = 4


def bench(url: str, *arguments: object) -> Result:
    words = ["bench", "serve", "--base-url", url, *map(str, arguments)]
    return CliRunner().invoke(make_app("bench"), words)


def figures(tmp_path: Path, url: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run, and read the JSON file; NaN and Infinity are no JSON."""
    path = tmp_path / "out.json"
    done = bench(url, *arguments, "--json", path)
    assert done.exit_code == code, done.output
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Steps of some length: shorter ones than the server's loop takes come in one chunk.
    with saying_server(num_drafts=NUM_DRAFTS, wrong_every=3, delay=0.01) as running:
        yield running


def counter(server: Server, name: str) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(name)


def test_a_real_server_level_by_level(server: Server, tmp_path: Path) -> None:
    names = ("vllm:spec_decode_num_drafts_total", "emberline:verify_emitted_tokens_total")
    before = [counter(server, name) for name in names]
    found = figures(
        tmp_path, server.url, "--concurrency", "1,3", "--num-requests", 6, "--max-tokens", 12,
        "--ignore-eos", "--details", "--warmup", 2,
        "--logprobs", 1,  # the text is random bytes, held back while no character is complete
    )  # fmt: skip
    server.rest()
    after = [counter(server, name) for name in names]
    assert found["model"] == "tiny"
    assert [level["level"] for level in found["levels"]] == [{"concurrency": 1}, {"concurrency": 3}]
    for level in found["levels"]:
        assert (level["ok"], level["failed"], level["counted_by"]) == (6, 0, "usage")
        assert level["completion_tokens"] == 6 * 12
        assert level["finish_reasons"] == {"length": 6}
        assert level["in_flight_peak"] == level["level"]["concurrency"]
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            assert level[name]["count"] == 6
            assert 0 < level[name]["median"] <= level[name]["p99"] <= level[name]["max"]
        told = level["acceptance"]
        assert told["source"] == "emberline.speculation"
        assert told["emitted"] == 6 * 11  # all but each answer's first token
        assert 1 < level["acceptance_length"] <= 1 + NUM_DRAFTS
        assert level["tokens_per_chunk"] > 1
        for request in level["requests"]:
            num_steps = request["acceptance"]["steps"]
            assert 1 < len(request["chunk_times"]) <= 1 + num_steps
            assert request["e2e"] == pytest.approx(request["end"] - request["start"])
    # 1 first request, and at both levels 2 of warm-up, are not counted above but by the server.
    emitted = sum(level["acceptance"]["emitted"] for level in found["levels"])
    assert after[1] - before[1] == emitted + 5 * 11
    assert after[0] - before[0] > sum(level["acceptance"]["steps"] for level in found["levels"])


def test_no_speculation_is_one_token_a_step(server: Server, tmp_path: Path) -> None:
    found = figures(
        tmp_path, server.url, "--request-rate", 200, "--num-requests", 5, "--max-tokens", 8,
        "--ignore-eos", "--extra-body", '{"speculate": false}', "--logprobs", 2,
    )  # fmt: skip
    [level] = found["levels"]
    assert level["level"] == {"request_rate": 200.0}
    assert level["acceptance_length"] == 1.0
    assert level["ok"] == 5


def test_random_token_ids_have_exactly_their_length(server: Server, tmp_path: Path) -> None:
    found = figures(
        tmp_path, server.url, "--endpoint", "completions", "--random-input-len", 20,
        "--random-output-len", 6, "--shared-prefix-len", 5, "--random-id-range", 10, 200,
        "--ignore-eos", "--num-requests", 4, "--concurrency", 2,
    )  # fmt: skip
    [level] = found["levels"]
    assert (level["prompt_tokens"], level["completion_tokens"]) == (4 * 25, 4 * 6)
    assert found["settings"]["prompts"]["kind"] == "random token ids"
    assert found["notes"] == []


def test_random_words_where_ids_are_refused(server: Server, tmp_path: Path) -> None:
    """The vocabulary of this server ends long before the ids that are drawn."""
    found = figures(
        tmp_path, server.url, "--endpoint", "completions", "--random-input-len", 8,
        "--random-output-len", 6, "--num-requests", 2,
    )  # fmt: skip
    assert found["settings"]["prompts"]["kind"] == "random words"
    assert "token ids were refused" in found["notes"][0]
    assert found["levels"][0]["ok"] == 2


def test_a_dataset_and_a_picture(server: Server, tmp_path: Path) -> None:
    path, picture = tmp_path / "set.jsonl", tmp_path / "out.png"
    path.write_text('{"turns": ["<say>one</say>", "more"]}\n{"prompt": "<say>three</say>"}\n')
    done = bench(
        server.url, "--dataset", path, "--concurrency", "1 2", "--duration", 0.3, "--plot", picture
    )
    assert done.exit_code == 0, done.output
    assert "1 of 2 prompts have more turns" in done.output
    assert "tokens a step: by emberline.speculation" in done.output
    for word in ("TTFT", "TPOT", "ITL", "E2E", "median", "p90", "p99"):
        assert word in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def fake(reply: Callable[[Asked], Reply], listed: Reply | None = None) -> Callable[[Asked], Reply]:
    """A server of one model without /metrics whose POSTs are answered by `reply`."""

    def answer(asked: Asked) -> Reply:
        if asked.method == "POST":
            return reply(asked)
        return (listed or models("m")) if asked.path == "/v1/models" else json_reply({}, 404)

    return answer


def without_usage(_asked: Asked) -> Reply:
    return Reply([chat_chunk("ab"), chat_chunk("c"), chat_chunk(finish="stop"), DONE])


def test_a_server_without_usage(tmp_path: Path) -> None:
    with fake_server(fake(without_usage)) as server:
        done = bench(server.url, "--num-requests", 3)
        assert done.exit_code == 0
        assert "the server gave no usage, output tokens are unknown (--tokenizer)" in done.output
        assert "tokens a step: not reported by the server" in done.output
        [level] = figures(tmp_path, server.url, "--num-requests", 3)["levels"]
        assert level["ok"] == 3
        assert level["completion_tokens"] is level["output_tokens_per_second"] is None
        assert level["tpot_ms"] is level["acceptance_length"] is level["cached_tokens"] is None
        assert level["ttft_ms"]["count"] == 3
        make_tokenizer().save_pretrained(tmp_path / "tok")
        [level] = figures(
            tmp_path, server.url, "--num-requests", 3, "--tokenizer", tmp_path / "tok"
        )["levels"]
        assert (level["completion_tokens"], level["counted_by"]) == (9, "tokenizer")


def test_failed_requests_are_shown_and_end_with_1(tmp_path: Path) -> None:
    numbers = itertools.count()

    def sometimes(_asked: Asked) -> Reply:
        if next(numbers) % 2:
            return json_reply({"object": "error", "message": "CUDA is out of memory"}, 500)
        return Reply([chat_chunk("a", "stop"), usage_chunk(3, 1), DONE])

    with fake_server(fake(sometimes)) as server:
        done = bench(server.url, "--num-requests", 6)
        assert done.exit_code == 1
        assert "3 failed with http_500: CUDA is out of memory" in done.output
        [level] = figures(tmp_path, server.url, "--num-requests", 6, code=1)["levels"]
    assert (level["ok"], level["failed"]) == (3, 3)
    message = "CUDA is out of memory"
    assert level["failures"] == [{"kind": "http_500", "count": 3, "message": message}]


def test_all_requests_failing_still_gives_a_report() -> None:
    with fake_server(fake(lambda _asked: json_reply({"detail": "no"}, 500))) as server:
        done = bench(server.url, "--num-requests", 2, "--concurrency", "1,2")
    assert done.exit_code == 1
    assert done.output.count("2 failed with http_500: no") == 2


def test_acceptance_from_metrics_where_answers_say_nothing(tmp_path: Path) -> None:
    counts = {"num_drafts": 50, "num_draft_tokens": 350, "num_accepted_tokens": 80}

    def answer(asked: Asked) -> Reply:
        if asked.path == "/metrics":
            lines = [f'vllm:spec_decode_{k}_total{{engine="0"}} {v}\n' for k, v in counts.items()]
            return Reply(["".join(lines).encode()], content_type="text/plain")
        if asked.path == "/v1/models":
            return models("m")
        counts["num_drafts"] += 4
        counts["num_draft_tokens"] += 28
        counts["num_accepted_tokens"] += 6
        return Reply([chat_chunk("a", "stop"), usage_chunk(3, 10), DONE])

    with fake_server(answer) as server:
        levels = figures(tmp_path, server.url, "--num-requests", 3, "--concurrency", "1,2")[
            "levels"
        ]
    for level in levels:
        assert level["acceptance_length"] == pytest.approx(2.5)
        assert level["acceptance"]["source"] == "/metrics"
        assert (level["acceptance"]["steps"], level["acceptance"]["verified"]) == (12, 84)


def refused(code: int) -> Callable[[Asked], Reply]:
    return fake(lambda _asked: json_reply({"error": {"message": "bad\nthing"}}, code))


LISTS_NOTHING = fake(without_usage, json_reply({}, 404))
TWO_MODELS = fake(without_usage, models("a", "b"))
LOCKED = fake(without_usage, json_reply({"error": "wants a key"}, 401))


@pytest.mark.parametrize(
    ("answer", "arguments", "message"),
    [
        (refused(404), ["--model", "other"], "answers 404: bad thing"),
        (refused(401), [], "answers 401: bad thing; give a key with --api-key"),
        (refused(400), ["--ignore-eos"], "answers 400: bad thing"),
        (LOCKED, [], "answers 401: wants a key; give a key with --api-key"),
        (TWO_MODELS, [], "serves several models, give --model: a, b"),
        (LISTS_NOTHING, [], "/v1/models lists no model: give --model"),
    ],
)
def test_a_server_that_will_take_no_request_ends_with_2_and_one_line(
    answer: Callable[[Asked], Reply], arguments: list[str], message: str
) -> None:
    with fake_server(answer) as server:
        done = bench(server.url, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert done.stdout == ""


def test_a_model_that_is_given_is_asked_for() -> None:
    for listed in (models("a", "b"), json_reply({}, 404)):
        with fake_server(fake(without_usage, listed)) as server:
            assert bench(server.url, "--model", "b", "--num-requests", 1).exit_code == 0
            assert {asked.json["model"] for asked in server.posts} == {"b"}


def test_nobody_there_ends_with_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = bench(f"http://127.0.0.1:{port}")
    assert done.exit_code == 2
    assert f"cannot reach http://127.0.0.1:{port}" in done.stderr
    assert done.stderr.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "2", "--request-rate", "3"], "contradict each other"),
        (["--concurrency", "1,x"], "--concurrency wants numbers, got 'x'"),
        (["--concurrency", "1.5"], "--concurrency must be whole numbers"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--concurrency", ""], "want numbers"),
        (["--request-rate", "-1"], "--request-rate must be over 0"),
        (["--num-requests", "3", "--duration", "2"], "contradict each other: give one"),
        (["--dataset", "absent.jsonl"], "--dataset absent.jsonl: no such file"),
        (["--shuffle"], "--shuffle needs --dataset"),
        (["--random-output-len", "4"], "--random-output-len: needs --random-input-len"),
        (["--shared-prefix-len", "4"], "--shared-prefix-len: needs --random-input-len"),
        (["--extra-body", "{"], "--extra-body is no JSON"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--extra-body", '{"n": 2}'], "--extra-body may not set 'n'"),
        (["--header", "no colon"], "--header and --api-key want 'Name: value'"),
        (["--header", "A: ü"], "--header and --api-key want 'Name: value'"),
        (["--api-key", "a\nb"], "--header and --api-key want 'Name: value'"),
        (["--header", "Content-Length: 3"], "--header may not set content-length"),
        (["--details"], "--details needs --json"),
        (["--json", "/no/such/folder/x.json"], "its folder is missing or not writable"),
        (["--plot", "x.txt"], "the suffix must be one of"),
        (["--json", "/tmp"], "is a folder"),
        (["--header", "foo"], "Name: value"),
        (["--tokenizer", "/no/such/tokenizer"], "--tokenizer /no/such/tokenizer"),
    ],
)
def test_options_are_refused_before_anything_is_sent(arguments: list[str], message: str) -> None:
    done = bench("http://127.0.0.1:9", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.strip().count("\n") == 0


@pytest.mark.parametrize(
    "levels", [["1", "2", "3"], ["1,2,3"], ["1, 2", "3"], ["1", "--concurrency", "2,3"]]
)
def test_levels_may_stand_apart_or_with_commas(levels: list[str]) -> None:
    with fake_server(fake(without_usage)) as server:
        done = bench(server.url, "--concurrency", *levels, "--num-requests", 3)
    assert done.exit_code == 0, done.output
    table = done.stdout.split("TTFT")[0].splitlines()
    assert [line.split()[:2] for line in table if line.split()[1:2] == ["3"]] == [
        ["1", "3"],
        ["2", "3"],
        ["3", "3"],
    ]


def test_a_concurrency_that_was_not_reached_is_said() -> None:
    with fake_server(fake(without_usage)) as server:
        done = bench(server.url, "--concurrency", 4, "--num-requests", 2)
    assert "concurrency 4: too few requests to reach it, give more --num-requests" in done.output


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    done = bench("http://127.0.0.1:9", "--plot", "x.png")
    assert done.exit_code == 2
    assert 'pip install "emberline[plot]"' in done.stderr


def test_keys_and_header_values_are_sent_and_not_written(tmp_path: Path) -> None:
    arguments = ("--api-key", "hush-1", "--header", "X-Tenant: hush-2", "--num-requests", 1)
    with fake_server(fake(without_usage)) as server:
        found = figures(tmp_path, server.url, *arguments)
        for asked in server.asked:
            assert asked.headers["authorization"] == "Bearer hush-1"
            assert asked.headers["x-tenant"] == "hush-2"
    assert found["settings"]["server"]["headers"] == ["X-Tenant"]
    assert "hush" not in json.dumps(found)


def test_ctrl_c_ends_in_order_and_reports(tmp_path: Path) -> None:
    # A run in the background starts with the signal ignored, and its children inherit that.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from emberline.cli import main; main()"
    )
    path = tmp_path / "out.json"

    def slow(_asked: Asked) -> Reply:
        return Reply([0.1, chat_chunk("a", "stop"), usage_chunk(3, 1), DONE])

    with fake_server(fake(slow)) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "bench", "serve", "--base-url", server.url,
             "--num-requests", "5000", "--concurrency", "4,8", "--json", str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while len(server.posts) < 20:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "interrupted, 4 requests in flight were cut" in out
    [level] = json.loads(path.read_text())["levels"]  # the second never began
    assert (level["interrupted"], level["failed"]) == (True, 0)
    assert 10 <= level["ok"] < 5000


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, emberline.bench.session, emberline.bench.report\n"
        "from emberline.cli.bench import serve\n"
        "assert not {'torch', 'transformers', 'fastapi', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_error_inside_one_stream_is_no_end_of_the_run() -> None:
    lock, numbers = threading.Lock(), itertools.count()

    def answer(_asked: Asked) -> Reply:
        with lock:
            broken = next(numbers) == 2
        if broken:
            return Reply([chat_chunk("a"), event({"error": {"message": "gave up"}}), DONE])
        return Reply([chat_chunk("a", "stop"), usage_chunk(3, 1), DONE])

    with fake_server(fake(answer)) as server:
        done = bench(server.url, "--num-requests", 4, "--concurrency", 2)
    assert done.exit_code == 1
    assert "1 failed with error_event: gave up" in done.output
