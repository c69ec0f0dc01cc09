"""Datasets are read or refused by line; random prompts have the lengths that were asked for."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from emberline.bench.prompts import Prompt, dataset, own_prompts, random_prompts
from emberline.bench.settings import BenchError, Endpoint, RandomPrompts


def write(folder: Path, *lines: str) -> Path:
    path = folder / "set.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_three_forms_of_a_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"turns": ["first", "second"], "question_id": 7}',
        "",
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
        '{"prompt": "a separator \u2028 inside"}',
    )
    found = dataset(path, "chat")
    prompts = list(islice(found.measured(0), 3))
    assert [prompt.fields("chat")["messages"] for prompt in prompts] == [
        [{"role": "user", "content": "first"}],
        ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}),
        [{"role": "user", "content": "a separator \u2028 inside"}],
    ]
    assert found.size == 3
    assert found.notes == ("1 of 3 prompts have more turns; only the first is asked",)


def test_prompts_of_completions(tmp_path: Path) -> None:
    path = write(tmp_path, '{"turns": ["text"]}', '{"prompt": [5, 6, 7]}')
    prompts = islice(dataset(path, "completions").measured(0), 2)
    assert [prompt.fields("completions") for prompt in prompts] == [
        {"prompt": "text"},
        {"prompt": (5, 6, 7)},
    ]


@pytest.mark.parametrize(
    ("line", "endpoint", "message"),
    [
        ("{not json", "chat", "no JSON"),
        ("[1]", "chat", "an object is expected, got list"),
        ('{"text": "x"}', "chat", "exactly one of turns, messages, prompt is expected, got none"),
        ('{"prompt": "x", "turns": ["y"]}', "chat", "exactly one of"),
        ('{"turns": []}', "chat", "turns must be a list of texts"),
        ('{"turns": "x"}', "chat", "turns must be a list of texts"),
        ('{"turns": [1]}', "chat", "turns must be a list of texts"),
        ('{"messages": ["x"]}', "chat", "messages must be a list of objects"),
        ('{"messages": [{"role": "user"}]}', "completions", "messages need --endpoint chat"),
        ('{"prompt": ""}', "chat", "prompt must be a text or a list of token ids"),
        ('{"prompt": [1, true]}', "completions", "prompt must be a text or a list of token ids"),
        ('{"prompt": [1, 2]}', "chat", "needs --endpoint completions"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, endpoint: Endpoint, message: str) -> None:
    path = write(tmp_path, '{"prompt": "good"}', line)
    with pytest.raises(BenchError, match="line 2") as caught:
        dataset(path, endpoint)
    assert message in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no such file"):
        dataset(tmp_path / "absent.jsonl", "chat")
    with pytest.raises(BenchError, match="holds no prompts"):
        dataset(write(tmp_path, "", "  "), "chat")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match="no UTF-8"):
        dataset(binary, "chat")


def test_every_level_asks_the_same_and_a_warmup_begins_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path, *(f'{{"prompt": "{i}"}}' for i in range(9)))
    found = dataset(path, "chat")
    texts = [prompt.content for prompt in islice(found.measured(0), 11)]
    assert texts == [*"012345678", "0", "1"]
    assert list(islice(found.measured(3), 11)) == [Prompt(str(text)) for text in texts]
    assert [prompt.content for prompt in islice(found.warmup(0), 2)] == ["8", "7"]
    shuffled = dataset(path, "chat", shuffle_seed=1)
    order = [prompt.content for prompt in islice(shuffled.measured(0), 9)]
    assert sorted(order) == texts[:9]
    assert order != texts[:9]
    again = dataset(path, "chat", shuffle_seed=1).measured(0)
    assert order == [prompt.content for prompt in islice(again, 9)]


def test_own_prompts_differ() -> None:
    found = own_prompts()
    assert found.size is not None
    texts = [prompt.content for prompt in islice(found.measured(0), found.size)]
    assert len(set(texts)) == found.size >= 16


SETTINGS = RandomPrompts(input_len=20, output_len=10, range_ratio=0.5, shared_prefix_len=4)


@pytest.mark.parametrize("as_ids", [True, False])
def test_random_lengths(as_ids: bool) -> None:
    prompts = list(islice(random_prompts(SETTINGS, 0, as_ids=as_ids).measured(0), 400))
    pieces = [p.content if as_ids else str(p.content).split(" ") for p in prompts]
    inputs = [len(piece) - 4 for piece in pieces]
    outputs = [prompt.max_tokens for prompt in prompts]
    assert set(inputs) == set(range(10, 31))
    assert set(outputs) == set(range(5, 16))
    assert len({tuple(piece[:4]) for piece in pieces}) == 1  # the shared prefix
    assert len({tuple(piece) for piece in pieces}) == 400
    if as_ids:
        assert {type(token) for piece in pieces for token in piece} == {int}
        assert all(1000 <= int(token) < 30_000 for piece in pieces for token in piece)


def test_levels_have_the_same_lengths_and_other_tokens() -> None:
    found = random_prompts(SETTINGS, 0, as_ids=True)
    first, second = (list(islice(found.measured(level), 50)) for level in (0, 1))
    warm = list(islice(found.warmup(0), 50))
    assert [len(p.content) for p in first] == [len(p.content) for p in second]
    assert [p.max_tokens for p in first] == [p.max_tokens for p in second]
    contents = [p.content for p in (*first, *second, *warm)]
    assert len(set(contents)) == 150
    assert len({content[:4] for content in contents}) == 1


def test_random_prompts_repeat_by_seed() -> None:
    def draw(seed: int) -> list[Prompt]:
        return list(islice(random_prompts(SETTINGS, seed, as_ids=False).measured(0), 5))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_no_ratio_is_one_length() -> None:
    settings = RandomPrompts(input_len=7, output_len=3)
    prompts = list(islice(random_prompts(settings, 0, as_ids=True).measured(0), 20))
    assert {(len(p.content), p.max_tokens) for p in prompts} == {(7, 3)}
