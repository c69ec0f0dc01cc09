"""`emberline eval` on a small model: what it writes, that it repeats, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from test_model_logprobs import GOLDEN, make_folder
from typer.testing import CliRunner

from emberline.cli import make_app
from emberline.config import EngineConfig, SpeculationConfig
from emberline.llm import LLM
from emberline.types import SamplingParams

TEXTS = {"short": ["Hello", "Tell me", "x = 1"], "odd": ["The end of", "aaaa"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("eval") / "small")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    place = tmp_path / "sets"
    place.mkdir()
    for name, texts in TEXTS.items():
        lines = [json.dumps({"turns": [text, "and more"]}) for text in texts]
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    return place


def run(*arguments: object) -> Result:
    common = ["--dtype", "float32", "--threads", "1", "--max-tokens", "24"]
    words = ["eval", *map(str, arguments), *common]
    return CliRunner().invoke(make_app("eval"), words)


def found(folder: Path, out: Path, *arguments: object) -> dict[str, Any]:
    done = run(folder, *arguments, "--json", out)
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())


def test_drafts_side_by_side(folder: Path, prompts: Path, tmp_path: Path) -> None:
    places = {
        "json": tmp_path / "e.json",
        "markdown": tmp_path / "e.md",
        "plot": tmp_path / "e.png",
    }
    outputs = [word for name, path in places.items() for word in (f"--{name}", path)]
    drafts = ["--draft", GOLDEN / "vanilla", "--draft", GOLDEN / "dflash", "--draft", "ngram"]
    done = run(folder, *drafts, "--prompts", prompts, "--sets", "short,odd", *outputs)
    assert done.exit_code == 0, done.output
    said = json.loads(places["json"].read_text())
    assert list(said["drafts"]) == ["vanilla", "dflash", "ngram"]
    assert said["settings"]["prompts"] == {"short": 3, "odd": 2}
    for name, draft in said["drafts"].items():
        width = draft["info"]["max_draft_tokens"]
        for temperature in ("T=0", "T=1"):
            found = draft[temperature]
            lengths = [row["acceptance_length"] for row in found["sets"].values()]
            assert found["macro"] == pytest.approx(sum(lengths) / 2, abs=1e-4)
            assert len(found["all"]["conditional_acceptance"]) == width
            assert ("ece" in found["all"]) == (name == "vanilla")
            assert found["all"]["steps"] == sum(r["steps"] for r in found["sets"].values())
    text = places["markdown"].read_text()
    assert "| draft | short | odd | mean | over vanilla |" in text
    assert "**Calibration of survival by position, T = 1**" in text
    assert "2 of odd" in text
    assert "all drafts verified" in done.output
    assert places["plot"].read_bytes().startswith(b"\x89PNG")


def test_lengths_are_the_engines_own_and_repeat(
    folder: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = ["--draft", GOLDEN / "vanilla", "--prompts", prompts, "--temperatures", "0,0.7"]
    first = found(folder, tmp_path / "1.json", *arguments)
    assert found(folder, tmp_path / "2.json", *arguments) == first
    other = found(folder, tmp_path / "3.json", *arguments, "--seed", 1)["drafts"]["vanilla"]
    rows = first["drafts"]["vanilla"]
    assert other["T=0"]["sets"]["odd"]["steps"] == rows["T=0"]["sets"]["odd"]["steps"]
    assert other["T=0.7"]["all"] != rows["T=0.7"]["all"]
    speculation = SpeculationConfig(planner="verify_all")
    config = EngineConfig(dtype="float32", threads=1, speculation=speculation)
    llm = LLM(str(folder), str(GOLDEN / "vanilla"), config, progress=False)
    params = SamplingParams(temperature=0, max_tokens=24)
    stats = [llm.chat([{"role": "user", "content": text}], params).stats for text in TEXTS["short"]]
    row = rows["T=0"]["sets"]["short"]
    assert row["steps"] == sum(s.num_steps for s in stats)
    assert row["emitted"] == sum(s.num_emitted for s in stats)
    assert sum(row["accepted"]) == sum(s.num_accepted for s in stats)


def test_a_scheduled_run_verifies_less(folder: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = ["--draft", GOLDEN / "vanilla", "--prompts", prompts / "short.jsonl"]
    whole = found(folder, tmp_path / "1.json", *arguments)["drafts"]["vanilla"]["T=1"]["all"]
    planned = found(
        folder, tmp_path / "2.json", *arguments, "--planner", "threshold", "--threshold", "0.5"
    )["drafts"]["vanilla"]["T=1"]["all"]
    assert sum(planned["verified"]) < sum(whole["verified"])
    for row in (whole, planned):
        for position in range(1, len(row["verified"])):
            assert row["verified"][position] >= row["reached"][position]
            assert row["accepted"][position - 1] >= row["reached"][position]


def test_names_follow_the_run(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "mine" / "draft"
    place.parent.mkdir()
    place.symlink_to(GOLDEN / "vanilla")
    named = ["--draft", "ngram", "--name", "words"]
    said = found(folder, tmp_path / "1.json", "--first", 2, "--temperatures", 0, *named)
    assert list(said["drafts"]) == ["words"]
    assert said["settings"]["prompts"] == {"built-in": 2}
    done = run(folder, "--draft", place, "--draft", f"{tmp_path}/mine/draft/")
    assert "two drafts are called mine" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "small comes with no draft: give --draft (a checkpoint, or ngram)"),
        (["--draft", "none"], "--draft none: without drafts there is nothing to measure"),
        (["--draft", "ngram", "--draft", "ngram"], "two drafts are called ngram"),
        (["--draft", "ngram", "--name", "a", "--name", "b"], "2 --name for 1 --draft"),
        (["--draft", "ngram", "--temperatures", "0,warm"], "--temperatures must be numbers"),
        (["--draft", "ngram", "--temperatures", "0,0"], "temperatures must differ"),
        (["--draft", "ngram", "--temperatures", "-1"], "temperature must be in"),
        (["--draft", "ngram", "--prompts", "/no/p"], "/no/p: cannot be read"),
        (["--draft", "ngram", "--temperatures", "nan"], "temperature must be a finite"),
        (["--draft", "ngram", "--planner", "threshold"], "and ngram has none: every draft would"),
        (["--draft", "{dflash}", "--planner", "causal_greedy"], "and dflash has none: every"),
        (["--draft", "ngram", "--sets", "a"], "--sets picks sets of a folder"),
        (["--draft", "ngram", "--prompts", "{sets}", "--sets", "a"], "it has long, odd, short"),
        (["--draft", "ngram", "--prompts", "{sets}"], "set long, prompt 2: "),
        (["--draft", "ngram", "--plot", "x.txt"], "--plot x.txt: the suffix must be"),
        (["--draft", "ngram", "--json", "/no/e.json"], "--json /no/e.json: its folder"),
    ],
)
def test_errors_are_one_line(
    folder: Path, prompts: Path, arguments: list[str], message: str
) -> None:
    lines = [{"prompt": "fine"}, {"prompt": "long " * 2000}]
    (prompts / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    places = {"sets": prompts, "dflash": GOLDEN / "dflash"}
    done = run(folder, *(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 1  # no bar of what never began
    assert done.stderr.splitlines()[-1].startswith("emberline: ")
    assert message in done.stderr
    assert done.stdout == ""
