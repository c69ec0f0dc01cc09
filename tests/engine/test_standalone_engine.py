"""A small language model as drafter, in whole engines and by itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.drafters import StandaloneDrafter
from emberline.drafters.checkpoint import load_drafter, read_draft_config
from emberline.engine.build import build_engine
from emberline.engine.engine import Engine
from emberline.models.weights import ModelError
from emberline.types import Request, SamplingParams

from support.drafter_world import TinyTarget
from support.engines import Answer, ask, collect, run
from support.tiny_standalone import save_tiny_model

PAGE = 8
PROMPT = [(7 * i + 3) % 40 for i in range(19)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: some of what it drafts is accepted."""
    folder = tmp_path_factory.mktemp("draft")
    model = LlamaForCausalLM.from_pretrained(target)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


def make(
    target: Path,
    draft: Path | None,
    *,
    drafts: int | None = None,
    num_tokens: int = 1024,
    prefix_cache: bool = True,
    **scheduler: Any,
) -> Engine:
    config = EngineConfig(
        dtype="float32",
        cache=CacheConfig(page_size=PAGE, num_tokens=num_tokens, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(**{"max_num_reqs": 8, **scheduler}),
        speculation=SpeculationConfig(num_draft_tokens=drafts),
        poison_padding=True,
    )
    return build_engine(target, draft, config, eos_ids=frozenset())


def greedy(count: int = 30) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count)


def requests() -> list[Request]:
    """Of very different lengths, with different numbers of tokens to come."""
    return [
        Request(str(i), tuple((5 * j + i) % 40 for j in range(3 + 11 * i)), greedy(9 + 7 * i))
        for i in range(4)
    ]


@cache
def plain(target: Path) -> dict[str, list[int]]:
    """What the target says without drafts."""
    answers = run(make(target, None), requests())
    return {name: answer.token_ids for name, answer in answers.items()}


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """Other tests count what is alive."""
    yield
    plain.cache_clear()


def test_config_alone_tells_that_it_is_a_model(target: Path) -> None:
    config = read_draft_config(target)
    assert (config.taps, config.max_draft_tokens) == ((), 4)


@pytest.mark.parametrize("drafts", [None, 1, 6])
def test_a_target_that_drafts_for_itself_is_always_right(target: Path, drafts: int | None) -> None:
    engine = make(target, target, drafts=drafts)
    width = (drafts or 4) + 1
    answer = ask(engine, PROMPT, greedy(1 + 5 * width))
    assert engine.info["drafter"] == "StandaloneDrafter"
    assert [len(output.token_ids) for output in answer.outputs] == [1, *[width] * 5]
    assert answer.token_ids == ask(make(target, None), PROMPT, greedy(1 + 5 * width)).token_ids


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_drafts_change_no_answer(target: Path, draft: Path, chunk: int) -> None:
    engine = make(target, draft, prefill_chunk=chunk)
    answers = run(engine, requests())
    assert {name: answer.token_ids for name, answer in answers.items()} == plain(target)
    drafted, accepted = (
        sum(getattr(answer.last.stats, name) for answer in answers.values())
        for name in ("num_drafted", "num_accepted")
    )
    assert 0 < accepted < drafted


def test_preemption_changes_no_answer(target: Path, draft: Path) -> None:
    growing = [Request(str(i), (i, 3, 9), greedy(40)) for i in range(4)]
    engine = make(target, draft, num_tokens=12 * PAGE)
    answers, expected = run(engine, growing), run(make(target, None), growing)
    assert engine.snapshot().num_preemptions > 0
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids


def test_a_batch_drafts_as_each_request_does_alone(target: Path, draft: Path) -> None:
    together = run(make(target, draft), requests())
    for request in requests():
        alone = run(make(target, draft), [request])[request.request_id]
        assert together[request.request_id].last.stats == alone.last.stats


@pytest.mark.parametrize("length", [15, 16, 17])
def test_a_warm_cache_drafts_as_a_cold_one(target: Path, draft: Path, length: int) -> None:
    engine = make(target, draft)
    cold, warm = (ask(engine, PROMPT[:length], greedy()) for _ in range(2))
    assert warm.last.num_cached_tokens == (length - 1) // PAGE * PAGE
    assert warm.token_ids == cold.token_ids
    assert warm.last.stats == cold.last.stats
    turn = [*PROMPT[:length], *cold.token_ids[:21], 4, 8]
    again, fresh = ask(engine, turn, greedy()), ask(make(target, draft), turn, greedy())
    assert again.last.num_cached_tokens >= (length + 20) // PAGE * PAGE
    assert again.token_ids == fresh.token_ids
    assert again.last.stats == fresh.last.stats


def test_an_abort_in_the_middle_leaves_others_alone(target: Path, draft: Path) -> None:
    engine = make(target, draft, prefill_chunk=8)
    answers = {request.request_id: Answer() for request in requests()}
    for request in requests():
        engine.add(request)
    engine.add(Request("gone", tuple(PROMPT), greedy(200)))
    for number in range(200):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.request_id != "gone":
                collect(answers[output.request_id], output)
        if number == 6:
            engine.abort("gone")
    assert {name: answer.token_ids for name, answer in answers.items()} == plain(target)
    assert engine.snapshot().kv_usage == 0


def test_a_shorter_context_drafts_as_far_as_it_reaches(target: Path, tmp_path: Path) -> None:
    """The same weights under a context of 32: right until there, and then no drafts."""
    short = LlamaForCausalLM.from_pretrained(target)
    short.config.max_position_embeddings = 32
    short.save_pretrained(tmp_path)
    engine = make(target, tmp_path, prefill_chunk=10)
    answer = ask(engine, PROMPT, greedy(40))
    assert answer.token_ids == ask(make(target, None), PROMPT, greedy(40)).token_ids
    blocks = [len(output.token_ids) for output in answer.outputs]
    # The anchor stands at 19, 24 and 29; from 29 only the drafts after 29, 30 and 31.
    assert blocks == [1, 5, 5, 4, *[1] * 25]
    # A prompt beyond it is simply not drafted for.
    long = [*PROMPT, *PROMPT]
    beyond = run(engine, [Request("long", tuple(long), greedy(8)), requests()[0]])
    assert beyond["long"].last.stats.num_drafted == 0
    assert beyond["long"].token_ids == ask(make(target, None), long, greedy(8)).token_ids
    assert beyond["0"].token_ids == plain(target)["0"]


def test_a_seeded_answer_is_the_same_cold_and_warm(target: Path, draft: Path) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=24, seed=3, accept="rejection")
    engine = make(target, draft)
    cold, warm = (ask(engine, PROMPT, params) for _ in range(2))
    assert 0 < cold.last.stats.num_accepted < cold.last.stats.num_drafted
    assert warm.token_ids == cold.token_ids
    assert warm.last.stats == cold.last.stats


def test_any_model_may_draft(target: Path, tmp_path: Path) -> None:
    """One outside the fused families, for itself and for another."""
    torch.manual_seed(2)
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    config = Phi3Config(vocab_size=40, initializer_range=0.3, eos_token_id=None, **fields, **heads)
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    answer = ask(make(tmp_path, tmp_path, max_model_len=256), PROMPT, greedy(11))
    assert [len(output.token_ids) for output in answer.outputs] == [1, 5, 5]
    other = ask(make(target, tmp_path), PROMPT, greedy(11))
    assert other.token_ids == ask(make(target, None), PROMPT, greedy(11)).token_ids


def test_refusals_say_why(target: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", vocab_size=41)
    with pytest.raises(ModelError, match=r"other: has a vocabulary of 41, the target of 40"):
        make(target, other)
    with pytest.raises(ModelError, match="a slot rule is of block drafts"):
        read_draft_config(other, "anchor")
    with pytest.raises(ModelError, match="calibrated, but without confidences"):
        load_drafter(
            target,
            TinyTarget(),
            dtype=torch.float32,
            device="cpu",
            num_pages=2,
            page_size=PAGE,
            confidence_temperatures=(1.0,) * 4,
        )


def test_the_class_is_the_tables(target: Path) -> None:
    assert isinstance(make(target, target).parts.drafter, StandaloneDrafter)
