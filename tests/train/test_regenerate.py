"""Rows from prompts through an engine: interrupted, gone on with, refused, selected anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from emberline.cli import make_app
from emberline.engine.engine import Engine
from emberline.prompts import Conversation, Message
from emberline.train.config import SynthesisConfig
from emberline.train.dataset import Role, load_rows
from emberline.train.regenerate import Job, regenerate
from emberline.train.selection import Selection
from emberline.train.starts import GivenPrompts, SelfWritten

from support.engines import make_engine
from support.paged import PrefixTarget
from support.tiny_chat import STOPS, chat_tokenizer, make_chat_target

TOKENIZER = chat_tokenizer()
CONFIG = SynthesisConfig(rounds=3, batch_size=5, seq_len=80, user_limit=9, plain_fraction=0.2)
RULES = Selection(min_answer=2, same_tokens=6, held_out=2)
ASKED = [
    *(Conversation.of(f"Question {i}?", "Go on", "And?") for i in range(9)),
    Conversation.of("question  3?"),  # the same but for case and space
    Conversation.of("x" * 100),
    Conversation((Message("system", "Be brief"), Message("user", "Hi"))),
]


class Talker(PrefixTarget):
    """Writes letters, and ends its turns now and then."""

    def __init__(self) -> None:
        super().__init__(vocab_size=len(TOKENIZER), num_slots=8192, order=18)

    def logits_after(self, prefix: Sequence[int]) -> torch.Tensor:
        logits = super().logits_after(list(prefix)).clone()
        logits[STOPS[0]] += 5
        return logits


def engine() -> Engine:
    return make_engine(Talker(), eos_ids=STOPS, num_pages=512, max_num_reqs=4)


def job(config: SynthesisConfig = CONFIG, rules: Selection = RULES, max_answer: int = 30) -> Job:
    return Job("talker", SelfWritten(TOKENIZER, STOPS, config), config, max_answer, rules)


def given(config: SynthesisConfig = CONFIG, asked: Sequence[Conversation] = ASKED) -> GivenPrompts:
    return GivenPrompts(TOKENIZER, STOPS, config, asked, min_answer=2)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def quiet(done: int, total: int, tokens: int) -> None: ...


class Killed(BaseException):
    """What no code of the synthesis catches."""


def test_rows_of_a_file_hold_its_prompts_and_the_targets_answers(tmp_path: Path) -> None:
    source = given()
    assert (source.num_starts, source.num_rounds) == (10, 2)
    assert (source.num_same, source.num_too_long) == (1, 1)
    told: list[tuple[int, int, int]] = []
    work = Job("talker", source, CONFIG, 30, RULES)
    counts = regenerate(engine(), TOKENIZER, tmp_path, work, lambda *seen: told.append(seen))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][:2] == (10, 10)
    assert counts.sampled == 10
    rows = [load_rows(tmp_path, split) for split in ("train", "held_out")]
    assert [part.num_rows for part in rows] == [counts.train, counts.held_out]
    assert counts.train_tokens == int((rows[0].roles > 0).sum())
    texts = [str(TOKENIZER.decode(row)) for part in rows for row in part.tokens.tolist()]
    asked = [f"user\nQuestion {i}?<|im_end|>\n<|im_start|>assistant\n" for i in range(9)]
    found = [i for i, text in enumerate(asked) for row in texts if text in row]
    assert len(found) == len(set(found)) >= 6
    later = [text for text in texts if "<|im_end|>\n<|im_start|>user\nGo on<|im_end|>" in text]
    assert later
    for part in rows:
        assert set(part.roles.unique().tolist()) == {Role.FORCED, Role.ANSWER}
    assert json.loads((tmp_path / "synthesis.json").read_text())["counts"]["sampled"] == 10


@pytest.mark.parametrize("source", ["self-written", "given"])
def test_a_killed_synthesis_goes_on_to_the_same_rows(tmp_path: Path, source: str) -> None:
    def work() -> Job:
        return job() if source == "self-written" else replace(job(), source=given())

    whole = tmp_path / "whole"
    calls: list[int] = []
    regenerate(engine(), TOKENIZER, whole, work(), lambda done, *_: calls.append(done))
    for stop in range(1, len(calls), 6):
        folder = tmp_path / str(stop)
        left = iter(range(stop))

        def kill(*_: int, left: object = left) -> None:
            if next(left, None) is None:  # type: ignore[call-overload]
                raise Killed

        with pytest.raises(Killed):
            regenerate(engine(), TOKENIZER, folder, work(), kill)
        with pytest.raises(FileNotFoundError, match="the synthesis is not done"):
            load_rows(folder, "train")
        regenerate(engine(), TOKENIZER, folder, work(), quiet)
        assert contents(folder) == contents(whole)


def test_killed_while_writing_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "again"
    regenerate(engine(), TOKENIZER, whole, job(), quiet)
    from emberline.train.dataset import TokenRows

    def kill(rows: TokenRows, path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(TokenRows, "save", kill)
        with pytest.raises(Killed):
            regenerate(engine(), TOKENIZER, folder, job(), quiet)
    # All is sampled: what is left needs no engine.
    idle = engine()
    regenerate(idle, TOKENIZER, folder, job(), quiet)
    assert idle.snapshot().num_engine_steps == 0
    assert contents(folder) == contents(whole)


def test_another_selection_samples_nothing(tmp_path: Path) -> None:
    before = regenerate(engine(), TOKENIZER, tmp_path, job(), quiet)
    idle = engine()
    after = regenerate(
        idle, TOKENIZER, tmp_path, job(rules=replace(RULES, held_out=0, min_answer=4)), quiet
    )
    assert idle.snapshot().num_engine_steps == 0
    assert after.sampled == before.sampled
    assert after.too_short > before.too_short
    assert not list(tmp_path.glob("held_out_*"))
    assert load_rows(tmp_path, "train").num_rows == after.train


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (replace(RULES, held_out=99), "held_out is 99: none to train on; lower it"),
        (replace(RULES, min_answer=30), "no row is left to train on: ask less of an answer"),
    ],
)
def test_rows_that_a_selection_left_none_of_are_not_missing(
    tmp_path: Path, rules: Selection, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        regenerate(engine(), TOKENIZER, tmp_path, job(rules=rules), quiet)
    with pytest.raises(ValueError, match=message):  # not "run the same one again"
        load_rows(tmp_path, "train")
    after = regenerate(engine(), TOKENIZER, tmp_path, job(), quiet)
    assert load_rows(tmp_path, "train").num_rows == after.train


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (job(replace(CONFIG, seed=1)), "sampled with seed 0, not 1"),
        (job(replace(CONFIG, rounds=4)), "sampled with rounds 3, not 4"),
        (job(max_answer=31), "sampled with max_answer 30, not 31"),
        (replace(job(), model="other"), "sampled with model 'talker', not 'other'"),
        (replace(job(), source=given()), "sampled with prompts 'self-written', not "),
    ],
)
def test_a_folder_of_other_dialogues_is_refused(tmp_path: Path, changed: Job, message: str) -> None:
    regenerate(engine(), TOKENIZER, tmp_path, job(), quiet)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message):
        regenerate(engine(), TOKENIZER, tmp_path, changed, quiet)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["train_000.safetensors", "sampled/round_000.safetensors"])
def test_rows_that_were_not_made_here_are_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"rows of another run")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"holds {name}, and no synthesis.json"):
        regenerate(engine(), TOKENIZER, tmp_path, job(), quiet)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ["", "[]", '{"sampling": 3}'])
def test_a_damaged_settings_file_is_called_that(tmp_path: Path, text: str) -> None:
    (tmp_path / "synthesis.json").write_text(text)
    with pytest.raises(ValueError, match="not what a synthesis writes"):
        regenerate(engine(), TOKENIZER, tmp_path, job(), quiet)


def test_the_command_samples_selects_and_repeats(tmp_path: Path) -> None:
    model = make_chat_target(tmp_path / "model", scale=0.3)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [f"Ask {i}", "More"]}) for i in range(8)))

    def run(out: str, *words: str) -> str:
        common = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--threads", "1"]
        sizes = ["--seq-len", "96", "--max-answer", "20", "--min-answer", "1", "--held-out", "1"]
        arguments = ["train", "synthesize", str(tmp_path / out), *common, *sizes, *words]
        done = CliRunner().invoke(make_app("train"), arguments)
        assert done.exit_code == 0, done.output
        return done.output

    said = run("a", "--prompts", str(prompts), "--limit", "7", "--sample-batch", "3")
    assert "7 prompts: 7 to ask" in said
    assert "7 dialogues: " in said
    run("b", "--prompts", str(prompts), "--limit", "7", "--sample-batch", "3")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(list((tmp_path / "a" / "sampled").glob("round_*"))) == 3
    run("c", "--rounds", "2", "--sample-batch", "6", "--sampler", "engine")
    rows = load_rows(tmp_path / "c", "train")
    assert rows.tokens.shape[1] == 96
    assert {Role.USER, Role.ANSWER} <= set(rows.roles.unique().tolist())
    run_lockstep = ["--rounds", "1", "--sample-batch", "4", "--sampler", "lockstep"]
    arguments = ["train", "synthesize", str(tmp_path / "d"), "--model", str(model), "--device",
                 "cpu", "--seq-len", "64", "--held-out", "2", *run_lockstep]  # fmt: skip
    done = CliRunner().invoke(make_app("train"), arguments)
    assert done.exit_code == 0, done.output
    assert load_rows(tmp_path / "d", "train").tokens.shape == (4, 64)
    before = contents(tmp_path / "d")
    arguments[-1] = "engine"
    done = CliRunner().invoke(make_app("train"), arguments)
    assert done.exit_code == 2
    assert "sampled with sampler 'lockstep', not 'engine'" in done.stderr
    assert contents(tmp_path / "d") == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "3"], "--limit is of a file's prompts"),
        (["--prompts", "p.jsonl", "--rounds", "2"], "--rounds is of self-written prompts"),
        (["--prompts", "/no/p.jsonl"], "/no/p.jsonl: cannot be read"),
        (["--sampler", "lockstep", "--max-answer", "9"], "leave --max-answer out"),
        (["--sampler", "engine", "--max-answer", "2"], "max_answer 2 is under min_answer 4"),
        (["--sampler", "engine", "--seq-len", "300"], "--seq-len 300: the model's context is 256"),
        (["--model", "/no/model"], "/no/model: no such file or folder"),
    ],
)
def test_errors_of_the_command_are_one_line(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, words: list[str], message: str
) -> None:
    model = tmp_path_factory.getbasetemp() / "chat-target"
    if not model.exists():
        make_chat_target(model)
    arguments = ["train", "synthesize", str(tmp_path), "--model", str(model), "--device", "cpu"]
    done = CliRunner().invoke(make_app("train"), [*arguments, *words])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
