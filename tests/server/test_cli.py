"""The command line as a user runs it: answers, one-line errors, a served model, a clean end."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from test_model_logprobs import GOLDEN, make_folder

from emberline.cli.serve import banner, serve

EMBERLINE = [sys.executable, "-c", "from emberline.cli import main; main()"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("cli") / "small")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EMBERLINE, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_help_names_the_verbs_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['emberline', '--help']\n"
        "from emberline.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    for verb in ("serve", "generate", "train", "export"):
        assert verb in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "/no/such/model", "--port", "0"], "/no/such/model: no such file or folder"),
        (["serve", "--threshold", "0.4"], "--threshold needs --planner threshold"),
        (["serve", "--max-num-reqs", "0"], "--max-num-reqs must be at least 1"),
        (["serve", "--max-num-reqs", "2000"], "--max-num-reqs must be at most 1024, got 2000"),
        (["serve", "--kv-tokens", "0"], "--kv-tokens must be at least 1, got 0"),
        (["serve", "--num-draft-tokens", "0"], "--num-draft-tokens must be at least 1"),
        (["serve", "--threads", "10000"], "--threads must be at most"),
        (["generate", "x", "--num-draft-tokens", "0"], "--num-draft-tokens must be at least 1"),
        (["serve", "--api-key", "two words"], "--api-key: an API key is a word"),
        (["serve", "--api-key-file", "/no/such"], "--api-key-file /no/such: No such file"),
        (["serve", "--verify-tolerance", "0.1"], "--verify-tolerance needs --verify-logprobs"),
        (["serve", "--max-queue", "0"], "--max-queue must be at least 1"),
        (["serve", "--draft", "/x", "--drafter", "ngram"], "give one"),
        (["serve", "--draft", "none", "--num-draft-tokens", "3"], "--num-draft-tokens needs"),
        (["serve", "--drafter", "none", "--num-draft-tokens", "3"], "--num-draft-tokens needs"),
        (
            ["serve", "--draft", "none", "--planner", "threshold"],
            "--planner threshold plans drafts",
        ),
        (["serve", "--draft", "ngram", "--port", "0"], "say --drafter ngram"),
        (["generate", "x", "--draft", "none", "--num-draft-tokens", "3"], "needs a drafter"),
        (["generate", "x", "--no-draft", "--num-draft-tokens", "3"], "contradict each other"),
        (["generate", "x", "--no-draft", "--draft", "/x"], "--no-draft and --draft contradict"),
        (["generate", "x", "--no-draft", "--drafter", "ngram"], "--no-draft and --drafter"),
        (["serve", "--host", "no.such.host.invalid"], "cannot listen on"),
        (["generate", "x", "--temperature", "-1"], "temperature must be in"),
        (["generate", "x", "--model", "/no/such/model"], "no such file or folder"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("emberline: ")
    assert message in done.stderr
    assert done.stdout == ""


def test_generate_prints_one_json_object(folder: Path) -> None:
    arguments = ["generate", "Hello", "--model", str(folder), "--json", "--logprobs", "2"]
    done = run(*arguments, "--draft", str(GOLDEN / "vanilla"), "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["logprobs"]) == len(answer["token_ids"]) == answer["completion_tokens"]
    assert all(len(entry["top"]) == 2 for entry in answer["logprobs"])
    assert answer["speculation"]["drafted"] > 0
    plain = json.loads(run(*arguments, "--no-draft", "--max-tokens", "12").stdout)
    assert plain["speculation"]["drafted"] == 0
    assert plain["logprobs"] == answer["logprobs"]


def test_generate_shows_the_answer_and_its_figures(folder: Path) -> None:
    done = run("generate", "abc", "--raw", "--model", str(folder), "--drafter", "ngram",
               "--max-tokens", "20", "--logprobs", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in ("logprob", "verify steps", "tokens/s"):
        assert word in done.stdout


def test_serve_says_where_answers_and_ends_on_sigterm(folder: Path) -> None:
    process = subprocess.Popen(
        [*EMBERLINE, "serve", str(folder), "--port", "0", "--draft", str(GOLDEN / "vanilla"),
         "--dtype", "float32", "--name", "small", "--log-level", "warning"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        shown = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", shown)):
            line = process.stderr.readline()
            assert line, shown
            shown += line
        with httpx.Client(base_url=found[0], timeout=60) as http:
            for attempt in range(200):
                try:
                    assert http.get("/health").status_code == 200
                    break
                except httpx.ConnectError:
                    assert attempt < 199
                    time.sleep(0.05)
            body = {"model": "small", "prompt": "Hello", "max_tokens": 5, "logprobs": 1}
            answer = http.post("/v1/completions", json=body).json()
            info = http.get("/server_info").json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) <= 5
        about = {
            "step_costs": "measured here",
            "threshold": None,
            "prefix_cache": True,
            "request_timeout": None,
            "grace_seconds": 30,
            "slow_reader_timeout": 60,
        }
        assert {name: info[name] for name in about} == about
        assert "float32" in shown
        assert "vanilla" in shown
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "Traceback" not in rest


def test_every_option_of_serve_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    for name in set(inspect.signature(serve).parameters) - {"model"}:
        assert f"`--{name.replace('_', '-')}`" in documented


@pytest.mark.parametrize("kv_tokens", [10**9, 10**13, 10**30])
def test_a_kv_cache_that_cannot_be_is_one_line(folder: Path, kv_tokens: int) -> None:
    done = run("serve", str(folder), "--port", "0", "--kv-tokens", str(kv_tokens))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "GB: lower --kv-tokens" in done.stderr


def test_a_taken_port_fails_before_anything_is_loaded(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", str(folder), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1 port" in done.stderr


def test_the_banner_says_what_is_promised() -> None:
    info = {"dtype": "float32", "max_model_len": 64, "drafter": None, "bitwise": True}
    shown = banner("m", info, "http://x:1")
    assert "none: one token a step" in shown
    assert "bitwise" in shown
    near = banner("m", {**info, "bitwise": False, "max_logit_diff": 1.5e-5}, "http://x:1")
    assert "within kernel noise (largest logit difference at the check: 1.5e-05)" in near
    unknown = banner("m", {**info, "bitwise": None, "max_logit_diff": None}, "http://x:1")
    assert "not checked: the KV cache is too small for the start-up check" in unknown
