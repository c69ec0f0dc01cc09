"""`emberline audit` as a user runs it: table, JSON, exit status; our own server, both dialects."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from emberline.audit.reference import Reference
from emberline.audit.settings import AuditError
from emberline.cli import make_app

from support.scripted_lm import ScriptedLM, scripted_server
from support.serving import saying_server

SMALL = ["--tokens", "8", "--prompts", "2", "--samples", "64", "--block", "3", "--dtype", "float32"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(make_app("audit"), ["audit", *arguments])


def test_a_table_and_a_file(tmp_path):
    path = tmp_path / "audit.json"
    with scripted_server(ScriptedLM()) as server:
        done = run(server.url, *SMALL, "--skip", "distribution", "--json", str(path))
    assert done.exit_code == 0, done.output
    figures = json.loads(path.read_text())
    assert figures["tool"] == "emberline audit"
    assert figures["passed"]
    assert figures["checks"]["rescoring"]["figures"]["max"] == 0.0
    assert len(figures["checks"]["rescoring"]["figures"]["max_by_position"]) == 8
    assert "distribution" not in figures["checks"]
    for name, check in figures["checks"].items():
        assert name in done.output
        assert check["proves"]


def test_a_failure_is_status_1_and_says_where():
    with scripted_server(ScriptedLM(faults={"no bias"})) as server:
        done = run(server.url, *SMALL, "--only", "logit_bias", "--only", "top_entry")
    assert done.exit_code == 1
    assert "'The capital of France is', logit_bias" in done.output
    assert "1 pass, 1 fail" in done.output


def test_nothing_that_could_be_checked_is_no_pass():
    with scripted_server(ScriptedLM()) as server:
        assert run(server.url, *SMALL, "--only", "processed").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["localhost:1"], "http://"),
        (["http://127.0.0.1:9"], "does not answer"),
        (["http://127.0.0.1:9", "--only", "everything"], "--only everything: the checks are"),
        (["http://127.0.0.1:9", "--exact", "--tolerance", "1"], "give one"),
        (["http://127.0.0.1:9", "--tokens", "1"], "--tokens must be 4 to 1024"),
        (["http://127.0.0.1:9", "--json", "/nowhere/x"], "--json /nowhere/x"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_processed_values_need_a_server_that_has_them():
    with scripted_server(ScriptedLM()) as server:
        done = run(server.url, *SMALL, "--logprobs-mode", "processed")
    assert done.exit_code == 2
    assert "--logprobs-mode processed: the server said 400" in done.stderr


@pytest.mark.parametrize("arguments", [["--api", "native"], ["--logprobs-mode", "processed"]])
def test_our_own_server(arguments):
    skip = [word for name in ("distribution", "counts", "batch") for word in ("--skip", name)]
    with saying_server(num_drafts=3, wrong_every=3) as server:
        done = run(server.url, *SMALL, "--exact", *arguments, *skip)
        server.rest()
    assert done.exit_code == 0, done.output
    assert "max 0, mean 0" in done.output


def test_the_reference_scores_as_its_model_does(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = [3, 5, 7, 11, 13]
    rows = Reference.load("tiny", tmp_path).rows(ids, 2, 4)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    assert [row.key for row in rows] == ids[2:]
    for row, line, token in zip(rows, expected[1:], ids[2:], strict=False):
        assert row.logprob == pytest.approx(float(line[token]), abs=1e-6)
        assert [one.logprob for one in row.top] == pytest.approx(line.topk(4).values.tolist())
        assert [one.key for one in row.top] == line.topk(4).indices.tolist()


def test_a_reference_that_is_not_there(tmp_path):
    with pytest.raises(AuditError, match="--reference nothing"):
        Reference.load("nothing", tmp_path / "nothing")
