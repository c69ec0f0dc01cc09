"""The engine that `emberline serve` serves: loaded into this process, or into one of its own.

Owns that choice, and that the other process logs as this one does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from emberline.config import EngineConfig
from emberline.engine.process_engine import StartingEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from emberline.engine.running_engine import RunningEngine
    from emberline.llm import LoadedEngine

EngineProcess = Literal["auto", "on", "off"]

DRIVER = Path("/dev/nvidiactl")
"""There where NVIDIA's driver is, as a rule."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A running engine with the text side of its model."""

    engine: RunningEngine
    tokenizer: PreTrainedTokenizerBase
    name: str


def start_engine(
    model: str | None,
    draft: str | None,
    config: EngineConfig,
    *,
    process: EngineProcess,
    log_level: str,
) -> ServedEngine:
    """Load an engine and let it run.

    Args:
        model: as in `load_engine`.
        draft: as in `load_engine`.
        config: the engine's settings.
        process: whether the engine has a process of its own; auto: on a GPU. There a step is so
            short that it would wait for whatever else the interpreter does; on a CPU the second
            process would take a core from the first.
        log_level: of either process.

    Raises:
        ModelError: as `load_engine`, or the engine's process ended while it loaded.
    """
    set_up_log(log_level)
    if process == "off" or (process == "auto" and not on_gpu(config)):
        from emberline.engine.async_engine import AsyncEngine
        from emberline.llm import load_engine

        loaded = load_engine(model, draft, config)
        engine = AsyncEngine(loaded.engine, loaded.token_text)
        return ServedEngine(engine, loaded.tokenizer, loaded.name)
    with StartingEngine(partial(_load, model, draft, config, log_level)) as starting:
        # All this is loaded while the engine is built; nothing of it may come before.
        import emberline.server.run  # noqa: F401
        from emberline.engine.detokenizer import TokenText
        from emberline.hub import load_tokenizer

        folder, name = starting.found()
        tokenizer = load_tokenizer(folder)  # while the engine is built
        return ServedEngine(starting.ready(TokenText(tokenizer)), tokenizer, name)


def on_gpu(config: EngineConfig) -> bool:
    """Whether the engine will run on a GPU, said before PyTorch is loaded where there may be one.

    A machine with a driver that PyTorch cannot use counts as well: its CPU engine then has a
    process of its own, which it does not need.
    """
    if config.device != "auto":
        return config.device != "cpu"
    if DRIVER.exists():
        return True
    from emberline.engine.resolve import resolve_config

    return resolve_config(config).device != "cpu"


def set_up_log(level: str) -> None:
    """Log to standard error."""
    logging.basicConfig(level=level.upper(), format="%(levelname)s: %(name)s: %(message)s")


def _load(
    model: str | None,
    draft: str | None,
    config: EngineConfig,
    log_level: str,
    found: Callable[[Path, str], None],
) -> LoadedEngine:
    """What the engine's own process does first."""
    from emberline.llm import load_engine

    set_up_log(log_level)
    return load_engine(model, draft, config, found=found)
