"""docs/audit.md has every option and every check, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from emberline.audit.checks import CHECKS
from emberline.audit.outcome import Fault, Verdict
from emberline.audit.settings import NOISE
from emberline.cli import make_app

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
TOOL = PAGE.split("\n## Our own server\n")[0]  # behind it are options of other commands


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_options_are_those_of_the_command() -> None:
    command = typer.main.get_command(make_app("audit")).commands["audit"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts if name[0] == "-"}
    assert set(re.findall(r"--[a-z][a-z-]+", TOOL)) == options


def test_checks_verdicts_and_causes_are_those_there_are() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("Checks"), flags=re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == [
        check.name for check in CHECKS
    ]
    for title, names in (("Verdicts", Verdict), ("Probable causes", Fault)):
        first = re.findall(r"^\| ([^|`]+?) \|", section(title), flags=re.MULTILINE)
        assert first[2:] == [str(name) for name in names]  # behind head and rule


def test_noise_is_the_one_forgiven() -> None:
    rows = re.findall(r"^\| (\w+16|float32) \| (\S+) \|", section("Noise"), flags=re.MULTILINE)
    assert {name: float(value) for name, value in rows} == NOISE
