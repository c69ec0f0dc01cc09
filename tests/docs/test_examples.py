"""Documented examples run, tables are fresh, links lead somewhere, options exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from emberline.cli import make_app

from support.serving import saying_server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.model
@pytest.mark.parametrize("name", ["README.md", "docs/models.md", "docs/python.md"])
def test_python_examples_run(name, capsys):
    examples = blocks(ROOT / name, "python")
    assert examples
    for example in examples:
        exec(compile(example, name, "exec"), {})
    assert capsys.readouterr().out


def test_the_example_of_responses_runs():
    [example] = blocks(ROOT / "docs/responses.md", "python")
    with saying_server(max_model_len=1024) as server:
        example = example.replace("http://localhost:8000", server.url)
        names: dict[str, Any] = {}
        exec(compile(example, "responses.md", "exec"), names)
        names["client"].close()
        assert names["second"].previous_response_id == names["first"].id
        assert server.url in example


@pytest.mark.model
def test_the_readme_shows_a_real_answer():
    """In bfloat16, as the server runs where the hardware multiplies in it: content and counts."""
    from emberline import LLM, EngineConfig, SamplingParams

    shown = json.loads(blocks(ROOT / "README.md", "json")[0])
    choice, stats = shown["choices"][0], shown["emberline"]["speculation"]
    llm = LLM(config=EngineConfig(dtype="bfloat16"), progress=False)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, logprobs=2))
    assert answer.text == choice["message"]["content"]
    assert len(answer.token_ids) == shown["usage"]["completion_tokens"]
    assert answer.num_prompt_tokens == shown["usage"]["prompt_tokens"]
    record = choice["logprobs"]["content"][0]
    assert answer.logprobs[0].logprob == pytest.approx(record["logprob"], abs=0.1)
    # Another processor rounds bfloat16 products elsewhere: how many drafts fit may differ there.
    assert answer.stats.acceptance_length > 1
    assert stats["acceptance_length"] == stats["emitted"] / stats["steps"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page):
    for name in re.findall(r"`((?:tests|docs|benchmarks|src)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_readme_tables_are_those_of_the_results():
    script = ROOT / "benchmarks" / "readme_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_options_exist(page):
    """Every `emberline VERB ... --option` of the docs is an option of that verb."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    for verb, rest in re.findall(
        r"emberline (serve|generate|train|export|inspect|calibrate|eval)\b([^\n`]*)", text
    ):
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            assert option in options_of(verb, rest), (verb, option)


def options_of(verb: str, rest: str) -> set[str]:
    command = typer.main.get_command(make_app(verb)).commands[verb]  # type: ignore[attr-defined]
    if isinstance(command, TyperGroup):  # a verb with verbs of its own
        words = rest.split()
        name = words[0] if words and words[0] in command.commands else "run"
        command = command.commands[name]
    return {"--help", *(name for parameter in command.params for name in parameter.opts)}
