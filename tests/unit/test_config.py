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
        (CacheConfig, {"gpu_memory": 0.0}, "gpu_memory must be over 0"),
        (CacheConfig, {"gpu_memory": 1.5}, "gpu_memory must be over 0 and at most 1"),
        (SchedulerConfig, {"max_num_reqs": 16, "max_num_tokens": 4}, "at least max_num_reqs"),
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


def test_defaults_are_the_devices() -> None:
    on_cpu, on_gpu = EngineConfig().on("cpu"), EngineConfig().on("cuda:1")
    assert on_cpu.scheduler == SchedulerConfig(16, 1_024, 1_024, 512)
    assert on_gpu.scheduler == SchedulerConfig(256, 8_192, 2_048, 2_048)
    assert (on_cpu.cache.num_tokens, on_gpu.cache.num_tokens) == (32_768, None)
    assert (on_cpu.device, on_gpu.device) == ("cpu", "cuda:1")
    assert (on_cpu.overlap, on_gpu.overlap) == (False, True)
    for config in (on_cpu, on_gpu):  # nothing is left to decide
        assert config.on(config.device) == config


def test_what_is_given_stands_on_every_device() -> None:
    given = EngineConfig(
        overlap=False,
        cache=CacheConfig(num_tokens=4096),
        scheduler=SchedulerConfig(max_num_reqs=3, prefill_chunk=64),
    )
    for device in ("cpu", "cuda:0"):
        found = given.on(device)
        assert (found.cache.num_tokens, found.overlap) == (4096, False)
        assert (found.scheduler.max_num_reqs, found.scheduler.prefill_chunk) == (3, 64)


def test_a_step_has_a_token_for_each_request() -> None:
    assert SchedulerConfig(max_num_tokens=4).on("cpu").max_num_reqs == 4
    with pytest.raises(ValueError, match="max_num_reqs must be at most 1024, got 2000"):
        SchedulerConfig(max_num_reqs=2000).on("cpu")
    assert SchedulerConfig(max_num_reqs=2000).on("cuda:0").max_num_reqs == 2000
