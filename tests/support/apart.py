"""Engines in processes of their own, and servers of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from emberline.engine.detokenizer import TokenText
from emberline.engine.engine import Engine
from emberline.engine.engine_child import Make, TellFound
from emberline.engine.process_engine import ProcessEngine, StartingEngine

from scripted_engine import make_scripted
from support.serving import NAME, Server, make_tokenizer, saying_engine, serve_running


@dataclass(frozen=True)
class Made:
    """What an engine's process builds."""

    engine: Engine
    token_text: TokenText


def make_saying(settings: dict[str, Any], found: TellFound) -> Made:
    """Runs in the engine's process."""
    found(Path("nowhere"), NAME)
    engine, tokenizer, _ = saying_engine(**settings)
    return Made(engine, TokenText(tokenizer))


@contextlib.contextmanager
def saying_apart(**settings: Any) -> Iterator[ProcessEngine]:
    """An engine over a saying target in a process of its own, until the end of the block."""
    with _running(partial(make_saying, settings)) as engine:
        yield engine


@contextlib.contextmanager
def scripted_apart(stall_timeout: float = 300.0, **settings: Any) -> Iterator[ProcessEngine]:
    """A scripted engine instead, which is there sooner."""
    with _running(partial(make_scripted, settings), stall_timeout=stall_timeout) as engine:
        yield engine


@contextlib.contextmanager
def server_apart(engine: ProcessEngine, **options: Any) -> Iterator[Server]:
    """A server of such an engine."""
    with serve_running(engine, make_tokenizer(), **options) as server:
        yield server


@contextlib.contextmanager
def _running(make: Make, **options: Any) -> Iterator[ProcessEngine]:
    with StartingEngine(make) as starting:
        assert starting.found()[0] == Path("nowhere")
        engine = starting.ready(TokenText(make_tokenizer()), **options)
        try:
            yield engine
        finally:
            engine.shutdown()
            assert not engine.alive
