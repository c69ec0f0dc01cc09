"""The commands of a page: what a user copies is what a test runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path, program: str, replace: Mapping[str, str]) -> list[list[str]]:
    """Every `$ program ...` of the page's console blocks, as arguments.

    Args:
        page: a Markdown file.
        program: the first word.
        replace: texts to put in place of others: addresses, folders.
    """
    found = []
    for block in blocks(page, "console"):
        joined = re.sub(r"\\\n\s*", " ", block)
        for line in re.findall(rf"^\$ ({re.escape(program)} .*)$", joined, flags=re.MULTILINE):
            for old, new in replace.items():
                line = line.replace(old, new)
            found.append(shlex.split(line, comments=True))
    assert found, f"{page} has no command of {program}"
    return found


def with_option(command: list[str], option: str, value: str) -> list[str]:
    """The command with another value of one of its options."""
    place = command.index(option) + 1
    return [*command[:place], value, *command[place + 1 :]]
