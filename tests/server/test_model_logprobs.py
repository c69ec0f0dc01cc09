"""A small trained model over HTTP: every log-probability is what plain transformers computes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.llm import load_engine

from support.serving import Server, serve

GOLDEN = Path(__file__).parents[1] / "golden"
SPECIALS = ["<mask>", "<eos>", "<user>", "<assistant>"]
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "vanilla": {"layout": "static"},
    "gated": {"planner": "threshold", "threshold": 0.4},
    "dflash": {},
}
PROMPTS = ["Hello there", "a", "The 🙂 of", "x = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2"]


def make_folder(folder: Path) -> Path:
    """The golden target with a tokenizer of plain bytes."""
    shutil.copytree(GOLDEN / "target", folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, *SPECIALS])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    template = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", chat_template=template
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def serving(folder: Path, name: str) -> Any:
    draft = None if name in ("none", "ngram") else str(GOLDEN / name)
    config = EngineConfig(
        dtype="float32",
        cache=CacheConfig(num_tokens=8192),
        scheduler=SchedulerConfig(max_num_reqs=8, prefill_chunk=32),
        speculation=SpeculationConfig(**SETTINGS[name]),
    )
    loaded = load_engine(str(folder), draft, config, progress=False)
    return serve(loaded.engine, loaded.tokenizer)


@pytest.fixture(scope="module", params=list(SETTINGS))
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Server]:
    torch.set_num_threads(1)
    with serving(folder, request.param) as running:
        yield running


@torch.no_grad()
def teacher_forced(oracle: Any, ids: list[int]) -> torch.Tensor:
    """[n, V]: row i is the distribution of token i + 1."""
    logits: torch.Tensor = oracle(torch.tensor([ids])).logits[0].float()
    return logits.log_softmax(-1)


def check(oracle: Any, ids: list[int], logprobs: dict[str, Any], server: Server) -> None:
    """Echoed arrays against plain transformers."""
    expected = teacher_forced(oracle, ids)
    values = logprobs["token_logprobs"]
    assert len(values) == len(ids)
    assert values[0] is None
    for position in range(1, len(ids)):
        row = expected[position - 1]
        assert values[position] == pytest.approx(float(row[ids[position]]), abs=1e-4)
        best = float(row.max())
        top = logprobs["top_logprobs"][position]
        assert max(top.values()) == pytest.approx(best, abs=1e-4)
        # The greedy test of likelihood harnesses.
        greedy = values[position] == max(top.values())
        assert greedy == (abs(float(row[ids[position]]) - best) < 1e-4)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_prompt_and_answer_are_scored_by_the_target(
    server: Server, oracle: Any, prompt: str, temperature: float
) -> None:
    """A15, A19, A24, B01, B03, B07: raw values, whatever was drafted and however it was sampled."""
    answer = server.complete(
        prompt,
        temperature=temperature,
        top_p=0.9 if temperature else 1.0,
        frequency_penalty=0.3 if temperature else 0.0,
        seed=5,
        echo=True,
        logprobs=2,
        max_tokens=40,
        ignore_eos=True,
        return_token_ids=True,
    )
    choice = answer["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 40
    check(oracle, ids, choice["logprobs"], server)
    # A34: generating and scoring agree to the bit.
    again = server.complete(ids, echo=True, logprobs=2, max_tokens=0)["choices"][0]
    assert again["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"]


def test_scores_hold_for_every_prompt_length(server: Server, oracle: Any) -> None:
    """B10: across chunk and page boundaries."""
    text = "It was the best of times, it was the worst of times, said a 🙂. " * 2
    ids = server.ids(text)[:70]
    expected = teacher_forced(oracle, ids)
    for length in (2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70):
        logprobs = server.complete(ids[:length], echo=True, logprobs=0, max_tokens=0)
        values = logprobs["choices"][0]["logprobs"]["token_logprobs"]
        rows = expected[torch.arange(length - 1), ids[1:length]].tolist()
        assert values[1:] == pytest.approx(rows, abs=1e-4)


def test_mixed_requests_side_by_side_answer_as_alone(server: Server) -> None:
    """A29, B13, B16, C29, D17: any mixture, any order, the same answers."""
    bodies = [
        {
            "prompt": PROMPTS[i % 4] * (1 + i % 3),
            "max_tokens": 3 + 7 * i % 20,
            "temperature": 0.0 if i % 3 else 1.0,
            "seed": i,
            "ignore_eos": True,
            **([{}, {"logprobs": 3}, {"logprobs": 0, "logprob_token_ids": [1, 2]}][i % 3]),
            **({"prompt_logprobs": 1} if i % 4 == 1 else {}),
        }
        for i in range(16)
    ]

    def ask(body: dict[str, Any]) -> Any:
        return server.post("/v1/completions", body).json()["choices"]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, bodies)) == alone
        assert list(pool.map(ask, reversed(bodies))) == alone[::-1]
    server.rest()


def test_streamed_records_are_the_whole_answers(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Tell me 🙂"}],
        "temperature": 0.8,
        "seed": 3,
        "max_tokens": 30,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 4,
    }
    whole = server.post("/v1/chat/completions", body).json()
    events = server.stream("/v1/chat/completions", body)
    records = [
        record
        for event in events
        for record in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert records == whole["choices"][0]["logprobs"]["content"]
    # How it was speculated may differ: planners learn from every step.
    streamed, at_once = (one["emberline"]["speculation"] for one in (events[-1], whole))
    assert streamed["emitted"] == at_once["emitted"] == 29


def test_speculation_changes_no_token_and_no_bit(folder: Path) -> None:
    """EQ: the same seeded and greedy answers from every drafter, layout and planner."""
    answers = {}
    for name in SETTINGS:
        with serving(folder, name) as server:
            done = [
                server.complete(
                    prompt, max_tokens=40, ignore_eos=True, logprobs=3, temperature=t, seed=9
                )
                for prompt in PROMPTS
                for t in (0.0, 0.9)
            ]
            answers[name] = [answer["choices"] for answer in done]
            # Where a planner has seen that drafts do not pay here, later answers may have none.
            drafted = sum(answer["emberline"]["speculation"]["drafted"] for answer in done)
            assert (drafted > 0) == (name != "none")
    assert all(answer == answers["none"] for answer in answers.values())
