"""Emberline: DSpark block speculative decoding with exact logprobs."""

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.types import (
    FinishReason,
    Grammar,
    InvalidRequest,
    QueueFull,
    Request,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "Completion",
    "EngineConfig",
    "FinishReason",
    "Grammar",
    "InvalidRequest",
    "QueueFull",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "Scores",
    "SpeculationConfig",
    "SpeculationStats",
    "TokenLogprobs",
]


def __getattr__(name: str) -> object:
    # torch and transformers take seconds to import: only those who run a model pay for them.
    if name in ("LLM", "Completion", "Scores"):
        from emberline import llm

        return getattr(llm, name)
    if name == "AsyncLLM":
        from emberline.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'emberline' has no attribute {name!r}")
