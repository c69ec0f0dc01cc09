"""Emberline: DSpark block speculative decoding with exact logprobs."""

from emberline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.types import (
    FinishReason,
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
    "CacheConfig",
    "Completion",
    "EngineConfig",
    "FinishReason",
    "InvalidRequest",
    "QueueFull",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculationConfig",
    "SpeculationStats",
    "TokenLogprobs",
]


def __getattr__(name: str) -> object:
    # torch and transformers take seconds to import: only those who run a model pay for them.
    if name in ("LLM", "Completion"):
        from emberline import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'emberline' has no attribute {name!r}")
