"""The table of faults is whole, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
IDS = {
    "A": "01 03 04 05 06 07 08 10 12 14 15 17 18 19 20 22 24 25 27 28 29 31 33 34 36 37 39 41",
    "B": "01 03 04 05 07 08 10 11 13 14 16",
    "C": "01 02 04 05 06 07 09 10 11 12 13 14 16 17 19 20 21 24 26 27 29 30 31 33 34 36 38 39 41 "
    "42 43 45 46 48 51 53 54 56",
    "D": "01 02 03 04 06 07 08 11 13 15 16 17 19 21 22 24 25 27 28 29 30 32 34 35 37 38",
    "E": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22",
}
EXPECTED = [f"{area}{number}" for area, numbers in IDS.items() for number in numbers.split()]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| [A-Z]\d", line)
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def defined_in(name: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / name).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_is_there_once_and_in_order() -> None:
    assert [row[0] for row in ROWS] == EXPECTED


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_holds_a_fault_off_exists(row: list[str]) -> None:
    name, fault, verdict, held = row
    assert fault
    assert verdict in ("test", "refused")
    named = TEST.findall(held)
    assert named, f"{name} names no test"
    assert len(named) == held.count("::"), f"{name}: not all of it is read"
    for path, test in named:
        assert test in defined_in(path), (path, test)
