"""Settings that cannot be are refused where they are made, by name."""

from __future__ import annotations

import pytest

from emberline.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculationConfig,
    usable_cores,
)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CacheConfig, {"page_size": 0}, "page_size must be at least 1"),
        (CacheConfig, {"page_size": 24}, "page_size must divide 128"),
        (CacheConfig, {"num_tokens": 0}, "num_tokens must be at least 1"),
        (SchedulerConfig, {"max_num_reqs": 0}, "max_num_reqs must be at least 1"),
        (SchedulerConfig, {"max_num_tokens": 4}, "at least max_num_reqs"),
        (SpeculationConfig, {"num_draft_tokens": 0}, "num_draft_tokens must be at least 1"),
        (SpeculationConfig, {"threshold": 1.5}, "threshold must be in"),
        (SpeculationConfig, {"planner": "best"}, "planner must be"),
        (SpeculationConfig, {"layout": "dense"}, "layout must be"),
        (SpeculationConfig, {"drafter": "eagle"}, "drafter must be"),
        (EngineConfig, {"dtype": "int8"}, "dtype must be"),
        (EngineConfig, {"threads": 0}, "threads must be at least 1"),
    ],
)
def test_refusals(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_no_more_threads_than_cores() -> None:
    assert EngineConfig(threads=usable_cores()).threads == usable_cores()
    with pytest.raises(ValueError, match=f"threads must be at most {usable_cores()}, the cores"):
        EngineConfig(threads=10_000)
