"""The Python front doors over an engine whose target says what a prompt tells it to."""

from __future__ import annotations

import pytest

from emberline import async_llm, llm
from emberline.async_llm import AsyncLLM
from emberline.engine.detokenizer import TokenText
from emberline.llm import LLM, LoadedEngine

from support.engines import make_engine
from support.paged import PrefixDrafter
from support.serving import NAME, SayingTarget, make_tokenizer


def load(num_drafts: int = 4, wrong_every: int = 3, **options: int) -> LoadedEngine:
    tokenizer = make_tokenizer()
    target = SayingTarget(tokenizer)
    drafter = PrefixDrafter(target, num_drafts, wrong_every) if num_drafts else None
    engine = make_engine(target, drafter, eos_ids=(target.eos,), **{"num_pages": 1024, **options})
    return LoadedEngine(engine, tokenizer, TokenText(tokenizer), NAME)


def offline(patch: pytest.MonkeyPatch, **options: int) -> tuple[LLM, LoadedEngine]:
    """An `LLM` of its own engine, and that."""
    loaded = load(**options)
    with patch.context() as patched:
        patched.setattr(llm, "load_engine", lambda *_, **__: loaded)
        return LLM(), loaded


def offline_async(patch: pytest.MonkeyPatch, **options: int) -> tuple[AsyncLLM, LoadedEngine]:
    """An `AsyncLLM` of its own engine, and that."""
    loaded = load(**options)
    with patch.context() as patched:
        patched.setattr(async_llm, "load_engine", lambda *_, **__: loaded)
        return AsyncLLM(), loaded
