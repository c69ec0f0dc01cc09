"""`emberline calibrate` on a small model: the file it writes, going on, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from test_model_logprobs import GOLDEN, make_folder
from typer.testing import CliRunner

from emberline.cli import make_app, recording
from emberline.cli.calibrate import split
from emberline.cli.recording import Recipe, recorded
from emberline.config import EngineConfig
from emberline.engine.trace import RequestTrace, read_traces
from emberline.hub import resolve_model
from emberline.llm import load_engine
from emberline.models.weights import ModelError
from emberline.train.question_split import is_reserved
from emberline.verify.calibration import Calibration

CONFIG = EngineConfig(dtype="float32", threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("calibrate") / "small")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "vanilla", tmp_path / "draft"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Hello"}, {"turns": ["Tell me", "More"]}, {"prompt": "x = 1"}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def recipe(folder: Path, draft: Path, prompts: Path | None) -> Recipe:
    model = resolve_model(str(folder))
    return Recipe(model, draft, prompts, (0.0, 1.0), max_tokens=16, limit=4, seed=0)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(make_app("calibrate"), ["calibrate", *map(str, arguments)])


def outline(traces: Sequence[RequestTrace]) -> dict[tuple[str, float], list[tuple[int, int]]]:
    """All but the confidences, whose last bits may depend on the batch."""
    return {
        (trace.prompt, trace.temperature): [(b.num_verified, b.num_accepted) for b in trace.blocks]
        for trace in traces
    }


def test_it_writes_a_calibration_that_the_engine_uses(
    folder: Path, draft: Path, tmp_path: Path
) -> None:
    done = run(folder, "--draft", draft, "--limit", 6, "--max-tokens", 24, "--holdout", 0.5,
               "--plot", tmp_path / "p.png", "--traces", tmp_path / "t.jsonl")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    for word in ("ECE before", "AUC", "mean", str(draft / "calibration.json"), "has not seen"):
        assert word in done.stdout.replace("\n", "")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    calibration = Calibration.load(draft / "calibration.json")
    header, traces = read_traces(tmp_path / "t.jsonl")
    assert header["num_draft_tokens"] == len(calibration.temperatures)
    assert {(t.prompt, t.temperature) for t in traces} == {
        (f"template questions/{i}", t) for i in range(6) for t in (0.0, 1.0)
    }
    fitted, _ = split(traces, 0.5, 0)
    assert calibration.num_samples == sum(len(trace.blocks) for trace in fitted)
    assert "template questions prompts at temperature 0 and 1" in calibration.dataset
    few = f"Warning: fitted to {calibration.num_samples} blocks, which are few"
    assert few in done.stdout
    engine = load_engine(str(folder), str(draft), CONFIG, progress=False).engine
    assert engine.info["calibrated"] is True
    plain = replace(CONFIG, speculation=replace(CONFIG.speculation, calibration="none"))
    engine = load_engine(str(folder), str(draft), plain, progress=False).engine
    assert engine.info["calibrated"] is False


def test_a_recording_ignores_the_calibration_there_is(
    folder: Path, draft: Path, prompts: Path
) -> None:
    before = recorded(recipe(folder, draft, prompts), None, CONFIG, lambda done, total: None)
    Calibration((9.0,) * 7).save(draft / "calibration.json")
    after = recorded(recipe(folder, draft, prompts), None, CONFIG, lambda done, total: None)
    assert after == before


def test_an_interrupted_recording_goes_on_where_it_stopped(
    folder: Path, draft: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tmp_path / "t.jsonl", recipe(folder, draft, prompts)
    progress: list[tuple[int, int]] = []
    whole = recorded(made, path, CONFIG, lambda done, total: progress.append((done, total)))
    assert progress == [(i, 6) for i in range(7)]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])
    progress.clear()
    again = recorded(made, path, CONFIG, lambda done, total: progress.append((done, total)))
    assert progress == [(i, 6) for i in range(2, 7)]
    assert outline(again) == outline(whole) == outline(read_traces(path)[1])
    assert len(path.read_text().splitlines()) == len(lines)
    # A whole one needs no model any more.
    monkeypatch.setattr(recording, "build_engine", pytest.fail)
    assert len(recorded(made, path, CONFIG, lambda done, total: None)) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 17}, "recorded with max_tokens 16, not 17"),
        ({"temperatures": (0.0,)}, r"recorded with temperatures \[0.0, 1.0\], not \[0.0\]"),
        ({"prompts": None}, "recorded with prompts 'prompts', not 'template questions'"),
    ],
)
def test_a_file_of_another_recording_is_refused(
    folder: Path, draft: Path, prompts: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    made, path = recipe(folder, draft, prompts), tmp_path / "t.jsonl"
    recorded(made, path, CONFIG, lambda done, total: None)
    before = path.read_bytes()
    with pytest.raises(ModelError, match=message):
        recorded(replace(made, **changes), path, CONFIG, lambda done, total: None)
    assert path.read_bytes() == before


def test_an_edited_prompt_file_is_another_recording(
    folder: Path, draft: Path, prompts: Path, tmp_path: Path
) -> None:
    made, path = recipe(folder, draft, prompts), tmp_path / "t.jsonl"
    recorded(made, path, CONFIG, lambda done, total: None)
    prompts.write_text(prompts.read_text().replace("Hello", "Goodbye"))
    with pytest.raises(ModelError, match="recorded with prompts_digest"):
        recorded(made, path, CONFIG, lambda done, total: None)


def test_written_prompts_are_the_same_again(folder: Path, draft: Path) -> None:
    found = [
        recorded(recipe(folder, draft, None), None, CONFIG, lambda done, total: None)
        for _ in range(2)
    ]
    assert found[0] == found[1]
    other = replace(recipe(folder, draft, None), seed=1)
    assert recorded(other, None, CONFIG, lambda done, total: None) != found[0]


def test_written_prompts_are_none_that_drafts_are_trained_on(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(recording, "conversation_ids", lambda _, one: asked.append(one.text))
    recording._prompts(recipe(folder, draft, None), list(range(12)))
    assert len(asked) == 12
    assert all(map(is_reserved, asked))


def test_a_prompt_is_on_one_side_of_the_split() -> None:
    traces = [RequestTrace(str(i), t, ()) for i in range(20) for t in (0.0, 1.0)]
    fitted, judged = split(traces, 0.25, seed=3)
    assert (len(fitted), len(judged)) == (30, 10)
    assert not {t.prompt for t in fitted} & {t.prompt for t in judged}
    assert split(traces, 0.25, seed=3) == (fitted, judged)
    assert split(traces, 0.25, seed=4) != (fitted, judged)
    assert split(traces, 0.0, seed=3) == (traces, traces)


def test_a_draft_without_confidences_is_refused_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberline.cli.recording.build_engine", None)
    done = run(str(folder), "--draft", str(GOLDEN / "dflash"))
    assert done.exit_code == 2, done.output
    assert "has no confidence head: nothing to calibrate" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}"], "no draft to calibrate: give --draft"),
        (["{folder}", "--draft", "none"], "no draft to calibrate: give --draft"),
        (["{folder}", "--draft", "{dflash}", "--limit", "2"], "dflash: has no confidence head"),
        (["{folder}", "--draft", "{vanilla}", "--prompts", "/no/p"], "/no/p: cannot be read"),
        (["{folder}", "--draft", "{vanilla}", "--out", "/no/c.json"], "/no/c.json: its folder"),
        (["{folder}", "--draft", "{vanilla}", "--temperature", "-1"], "temperature must be in"),
        (["/no/model"], "/no/model: no such file or folder"),
        (
            ["{folder}", "--draft", "{vanilla}", "--max-tokens", "8"],
            "--max-tokens 8: only an answer of 9 tokens has room for a whole block of 7 drafts",
        ),
        (
            ["{folder}", "--draft", "{vanilla}", "--holdout", "0.9", "--limit", "2"],
            "--holdout 0.9 of 2 prompts leaves none to fit to",
        ),
    ],
)
def test_errors_are_one_line(folder: Path, arguments: list[str], message: str) -> None:
    places = {"folder": folder, "dflash": GOLDEN / "dflash", "vanilla": GOLDEN / "vanilla"}
    done = run(*(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2, done.stdout
    assert done.stderr.splitlines()[-1].startswith("emberline: ")
    assert message in done.stderr
    assert done.stdout == ""
