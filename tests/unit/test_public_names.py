"""The package's front is a promise: changing it is a decision, not an accident."""

from __future__ import annotations

import emberline


def test_public_names():
    assert emberline.__all__ == [
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
    for name in emberline.__all__:
        assert getattr(emberline, name) is not None
