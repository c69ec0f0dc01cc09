"""lm-eval: the choices and the scores are those of plain transformers, drafted or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from emberline.hub import load_tokenizer

from support.documented import with_option
from support.program import Program

HERE = Path(__file__).parent
ITEMS = [json.loads(line) for line in (HERE / "two_choices.jsonl").read_text().splitlines()]
MAX_TOKENS = 24  # of two_answers.yaml
Run = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(model_folder)


@pytest.fixture(scope="module")
def oracle(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def evaluate(
    run_client: Run,
    documented: Callable[[str, Program], list[list[str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Program, str], dict[str, Any]]:
    """Runs lm-eval as documented; the samples of every task, in the order of the items."""

    @cache
    def samples(server: Program, kind: str) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("lm_eval")
        tasks = ["two_answers"] if kind == "chat" else ["two_choices", "two_answers"]
        model = "local-chat-completions" if kind == "chat" else "local-completions"
        (command,) = (one for one in documented("lm-eval", server) if model in one)
        command = with_option(command, "--tasks", ",".join(f"./{task}.yaml" for task in tasks))
        run_client(*command, "--output_path", out, "--log_samples", cwd=HERE)
        return {task: _samples(out, task) for task in tasks}

    return samples


def _samples(out: Path, task: str) -> list[dict[str, Any]]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda s: s["doc_id"])
    assert [sample["doc"] for sample in samples] == ITEMS
    return samples


def scores(samples: list[dict[str, Any]]) -> list[list[tuple[float, bool]]]:
    """Per item and choice: the log-probability, and whether it is the greedy continuation."""
    return [
        [(float(logprob), str(greedy) == "True") for logprob, greedy in sample["filtered_resps"]]
        for sample in samples
    ]


def answers(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["resps"][0][0] for sample in samples]


@torch.no_grad()
def plain_scores(oracle: Any, tokenizer: Any, item: dict[str, Any]) -> list[tuple[float, bool]]:
    """Every choice scored by plain transformers."""
    context = f"Question: {item['question']}\nAnswer:"
    start = len(tokenizer(context)["input_ids"])
    found = []
    for choice in item["choices"]:
        ids = torch.tensor(tokenizer(f"{context} {choice}")["input_ids"])
        rows = oracle(ids[None]).logits[0].float().log_softmax(-1)[start - 1 : -1]
        said = ids[start:]
        logprob = float(rows.gather(1, said[:, None]).sum())
        found.append((logprob, bool((rows.argmax(-1) == said).all())))
    return found


@torch.no_grad()
def plain_answer(oracle: Any, tokenizer: Any, prompt: str) -> str:
    """Greedy, cut at the line's end."""
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    eos = tokenizer.eos_token_id
    said = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        pad_token_id=eos,
    )[0, ids.shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True)).split("\n")[0]


def question(item: dict[str, Any]) -> str:
    first, second = item["choices"]
    return f"Question: {item['question']} Is it {first} or {second}?\nAnswer:"


def test_choices_and_scores_are_those_of_plain_transformers(
    drafted: Program, evaluate: Any, oracle: Any, tokenizer: Any
) -> None:
    found = scores(evaluate(drafted, "completions")["two_choices"])
    for item, served in zip(ITEMS, found, strict=True):
        expected = plain_scores(oracle, tokenizer, item)
        for (logprob, greedy), (wanted, wanted_greedy) in zip(served, expected, strict=True):
            assert logprob == pytest.approx(wanted, abs=1e-3), item
            assert greedy == wanted_greedy, item
        chosen, wanted_choice = (max((0, 1), key=lambda i: s[i][0]) for s in (served, expected))
        assert chosen == wanted_choice, item


def test_a_draft_changes_no_score(drafted: Program, plain: Program, evaluate: Any) -> None:
    with_draft, without = (evaluate(s, "completions")["two_choices"] for s in (drafted, plain))
    assert scores(with_draft) == scores(without)
    assert [s["acc"] for s in with_draft] == [s["acc"] for s in without]


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_draft_changes_no_answer(
    kind: str, drafted: Program, plain: Program, evaluate: Any
) -> None:
    with_draft, without = (answers(evaluate(s, kind)["two_answers"]) for s in (drafted, plain))
    assert with_draft == without
    assert drafted.counter("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert plain.counter("vllm:spec_decode_num_draft_tokens_total") == 0


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_answers_are_those_of_plain_transformers(
    kind: str, drafted: Program, evaluate: Any, oracle: Any, tokenizer: Any
) -> None:
    found = answers(evaluate(drafted, kind)["two_answers"])
    assert sum(bool(answer.strip()) for answer in found) >= 10, found  # most begin no new line
    for item, answer in zip(ITEMS, found, strict=True):
        prompt = question(item)
        if kind == "chat":
            asked = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(
                asked, tokenize=False, add_generation_prompt=True
            )
        assert answer == plain_answer(oracle, tokenizer, prompt), item
