"""Calls that an engine's process makes to build its engine, and programs that start one and wait.

Imports little, so that those processes are there at once.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from emberline.engine.engine_child import TellFound
from emberline.types import InvalidRequest

from scripted_engine import make_scripted


def no_memory(found: TellFound) -> Any:
    from emberline.models.weights import ModelError

    raise ModelError("there is not enough memory: lower --kv-tokens")


def bad_option(found: TellFound) -> Any:
    raise InvalidRequest("no such thing", "thing")


def ends(found: TellFound) -> Any:
    found(Path("x"), "x")
    os._exit(7)


def builds_for_ever(found: TellFound) -> Any:
    found(Path("x"), "x")
    time.sleep(600)


def wait_with_engine(when: str) -> NoReturn:
    """Start an engine's process, print its id once it is building or built, and do nothing."""
    from emberline.engine.process_engine import StartingEngine

    make = builds_for_ever if when == "building" else partial(make_scripted, {})
    starting = StartingEngine(make)
    starting.found()
    pid = starting.ready(None).pid if when == "built" else starting.pid  # type: ignore[arg-type]
    print(pid, flush=True)
    time.sleep(600)
    raise AssertionError("nobody has ended this program")
