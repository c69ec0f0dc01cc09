"""Log-probabilities of `POST /generate` with a small trained model: what clients' kits assert."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_logprobs import make_folder, serving

from support.serving import Server, strict

PROMPTS = ["The capital of France is", "Today is a sunny day and I like"]
LIMIT = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module", params=["none", "vanilla", "gated"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Server]:
    torch.set_num_threads(1)
    with serving(folder, request.param) as running:
        yield running
        running.rest()


def generate(server: Server, options: dict[str, Any], **body: Any) -> Any:
    answer = server.post("/generate", {"sampling_params": options, **body})
    assert answer.status_code == 200, answer.text
    return strict(answer.content)


def rescored(server: Server, ids: list[int], **body: Any) -> dict[str, Any]:
    """The same tokens, as a prompt."""
    options = {"temperature": 0, "max_new_tokens": 0}
    body = {"return_logprob": True, "logprob_start_len": 0, **body}
    meta: dict[str, Any] = generate(server, options, input_ids=ids, **body)["meta_info"]
    assert meta["completion_tokens"] == 0
    return meta


def test_counts_from_a_start_on(server: Server) -> None:
    """Two prompts in a batch, reported from position 4 on."""
    options = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 4}
    for answer in generate(server, options, text=PROMPTS, **body):
        meta = answer["meta_info"]
        assert meta["prompt_tokens"] == 4 + len(meta["input_token_logprobs"])
        assert meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 4
        assert len(meta["input_top_logprobs"]) == len(meta["input_token_logprobs"])


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_generated_and_rescored_values_agree(server: Server, temperature: float) -> None:
    """A long answer, and the same tokens sent again as a prompt: equal to the bit on a CPU."""
    options = {"temperature": temperature, "max_new_tokens": 120, "ignore_eos": True}
    body = {"return_logprob": True, "logprob_start_len": 0}
    ids = server.ids(PROMPTS[0])
    answer = generate(server, options, input_ids=ids, **body)
    meta = answer["meta_info"]
    again = rescored(server, ids + answer["output_ids"])["input_token_logprobs"]
    assert meta["input_token_logprobs"] == again[: len(ids)]
    assert meta["output_token_logprobs"] == again[len(ids) :]
    assert len(again) == len(ids) + 120


LENGTHS = [
    (num_prompt, num_output, start, reports, num_top)
    for num_prompt, num_output, start, reports, num_top in product(
        (20, 50, 100, 150), (4, 8), (0, 10, 30, 80, 148), (True, False), (0, 5)
    )
    if start < num_prompt
]


def test_mixed_lengths_starts_and_widths_side_by_side(server: Server) -> None:
    """Every entry stands in its own row: at T = 0 the chosen token is the first alternative."""

    def ask(case: tuple[int, int, int, bool, int]) -> None:
        num_prompt, num_output, start, reports, num_top = case
        options = {"temperature": 0, "max_new_tokens": num_output, "ignore_eos": True}
        meta = generate(
            server,
            options,
            input_ids=[i % 250 for i in range(num_prompt)],
            return_logprob=reports,
            logprob_start_len=start,
            top_logprobs_num=num_top,
        )["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (num_prompt, num_output)
        if not reports:
            assert not any("logprobs" in key for key in meta)
            return
        sides = ["token", *(["top"] if num_top else [])]
        for side in sides:
            assert len(meta[f"input_{side}_logprobs"]) + start == num_prompt
            assert len(meta[f"output_{side}_logprobs"]) == num_output
        if num_top:
            assert all(len(row) == num_top for row in meta["output_top_logprobs"])
            for chosen, row in zip(
                meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
            ):
                tied = [entry for entry in row if entry[0] == row[0][0]]
                assert chosen in tied
                assert chosen == row[0]  # ties go to the lowest id, which stands first

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, LENGTHS))


def test_alternatives_and_chosen_ids_agree_with_a_rescoring(server: Server) -> None:
    chosen_ids = [1, 2, 10, 100, 200]
    body = {"top_logprobs_num": 5, "token_ids_logprob": chosen_ids}
    options = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    for prompt in PROMPTS:
        ids = server.ids(prompt)
        answer = generate(
            server, options, input_ids=ids, return_logprob=True, logprob_start_len=0, **body
        )
        said = answer["meta_info"]
        again = rescored(server, ids + answer["output_ids"], **body)
        for kind in ("token", "top", "token_ids"):
            output, scored = said[f"output_{kind}_logprobs"], again[f"input_{kind}_logprobs"]
            assert output == scored[len(ids) :]
            assert said[f"input_{kind}_logprobs"] == scored[: len(ids)]
        for row in said["output_token_ids_logprobs"]:
            assert [entry[1] for entry in row] == chosen_ids
        assert all(len(row) == 5 for row in said["output_top_logprobs"])


def test_ragged_lists_of_chosen_ids_side_by_side(server: Server) -> None:
    lists = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]] * 2
    options = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"return_logprob": True, "top_logprobs_num": 3}

    def ask(chosen: list[int]) -> Any:
        answer = generate(server, options, text=PROMPTS[1], token_ids_logprob=chosen, **body)
        assert answer["text"]
        return answer["meta_info"]["output_token_ids_logprobs"]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, lists))
    batch = generate(server, options, text=[PROMPTS[1]] * 8, token_ids_logprob=lists, **body)
    for chosen, rows, one in zip(lists, together, batch, strict=True):
        assert [[entry[1] for entry in row] for row in rows] == [chosen] * 8
        assert one["meta_info"]["output_token_ids_logprobs"] == rows


def test_a_temperature_is_each_requests_own(server: Server) -> None:
    """Processed values are the raw ones rescaled by the request's own temperature."""
    temperatures = [0.5, 1.0, 1.7]
    shared = {"max_new_tokens": 12, "ignore_eos": True, "seed": 3, "logprobs_mode": "both"}
    options = [{**shared, "temperature": temperature} for temperature in temperatures]
    every = list(range(server.engine.vocab_size))
    answers = generate(
        server,
        options,  # type: ignore[arg-type]
        text=[PROMPTS[0]] * 3,
        return_logprob=True,
        token_ids_logprob=every,
    )
    for temperature, answer in zip(temperatures, answers, strict=True):
        meta = answer["meta_info"]
        raw = torch.tensor([[e[0] for e in row] for row in meta["output_token_ids_logprobs"]])
        expected = (raw / temperature).log_softmax(-1)
        rows = meta["processed_output_token_ids_logprobs"]
        processed = torch.tensor([[entry[0] for entry in row] for row in rows])
        assert (processed - expected).abs().max() < LIMIT


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Any] = {
    "json_schema": json.dumps(SCHEMA),
    "regex": r"(ab|cd){3}[0-9]",
    "ebnf": 'root ::= pair pair\npair ::= "x" [0-9] | "yz"\n',
}


@pytest.mark.parametrize(
    ("field", "temperature"),
    [("json_schema", 1.0), ("regex", 0), ("regex", 1.0), ("ebnf", 0), ("ebnf", 1.0)],
)
def test_grammars_hold_and_every_token_has_its_record(
    server: Server, field: str, temperature: float
) -> None:
    options = {"temperature": temperature, "seed": 4, "max_new_tokens": 450}
    options[field] = GRAMMARS[field]
    answer = generate(server, options, text="An answer: ", return_logprob=True)
    text, meta = answer["text"], answer["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert meta["finish_reason"]["type"] == "stop"
    if field == "json_schema":
        made = json.loads(text)
        assert (type(made["name"]), type(made["count"])) == (str, int)
    else:
        pattern = {"regex": GRAMMARS["regex"], "ebnf": r"(x[0-9]|yz){2}"}[field]
        assert re.fullmatch(pattern, text)


def test_what_does_not_compile_is_refused(server: Server) -> None:
    for field, value in (
        ("json_schema", "no json"),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("regex", "["),
        ("ebnf", 'root ::= missing "x"'),
    ):
        answer = server.post("/generate", {"text": "x", "sampling_params": {field: value}})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == f"sampling_params.{field}"
    both = {"regex": "a", "ignore_eos": True}
    answer = server.post("/generate", {"text": "x", "sampling_params": both})
    assert answer.json()["error"]["param"] == "sampling_params.ignore_eos"
