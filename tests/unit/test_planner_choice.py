"""Which planner an engine gets, and what it needs for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from emberline.config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.drafters.dspark import DSparkDrafter
from emberline.drafters.ngram import NGramDrafter
from emberline.engine.build import (
    fits_device_step,
    make_planner,
    planner_costs,
    planning,
    resolve_planner,
)
from emberline.engine.engine import Engine
from emberline.models.decoder import Decoder
from emberline.models.target import Target
from emberline.models.weights import ModelError
from emberline.verify.planner import CausalGreedy, LaggedTopK, Threshold, VerifyAll
from emberline.verify.step_cost import StepCosts

COSTS = StepCosts(target=((1, 1, 1.0), (1, 8, 2.0)), draft=())
NO_ENGINE = cast(Engine, None)


def draft(confidence: object) -> DSparkDrafter:
    """A drafter that has nothing but a confidence head, or not even that."""
    drafter = object.__new__(DSparkDrafter)
    vars(drafter)["_confidence"] = confidence
    return drafter


@pytest.mark.parametrize(
    ("drafter", "max_num_reqs", "expected"),
    [
        (draft("head"), 16, "lagged_top_k"),
        (draft("head"), 1, "verify_all"),
        (draft(None), 16, "verify_all"),
        (NGramDrafter(), 16, "verify_all"),
        (None, 16, "verify_all"),
    ],
)
def test_auto_schedules_where_there_is_something_to_schedule(
    drafter: Any, max_num_reqs: int, expected: str
) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_reqs=max_num_reqs)).on("cpu")
    assert resolve_planner(config, drafter) == expected


def test_a_gpu_schedules_likewise() -> None:
    config = EngineConfig().on("cuda:0")
    assert resolve_planner(config, draft("head")) == "lagged_top_k"
    assert resolve_planner(config, draft(None)) == "verify_all"


@pytest.mark.parametrize(
    ("device", "target", "drafter", "expected"),
    [
        ("cuda:0", object.__new__(Decoder), draft("head"), True),
        ("cuda:0", object.__new__(Decoder), None, True),
        ("cuda:0", object.__new__(Decoder), NGramDrafter(), False),
        ("cuda:0", object(), None, False),  # transformers' own code
        ("cpu", object.__new__(Decoder), draft("head"), False),
    ],
)
def test_steps_run_ahead_where_nothing_in_them_needs_the_host(
    device: str, target: object, drafter: Any, expected: bool
) -> None:
    config = EngineConfig().on(device)
    assert fits_device_step(cast(Target, target), drafter, config) == expected


def test_a_planner_that_needs_the_step_on_the_host_cannot_run_ahead() -> None:
    target = object.__new__(Decoder)
    speculation = SpeculationConfig(planner="causal_greedy")
    config = EngineConfig(speculation=speculation).on("cuda:0")
    with pytest.raises(ModelError, match="lagged_top_k, or --no-overlap"):
        fits_device_step(target, draft("head"), config)
    step_by_step = EngineConfig(speculation=speculation, overlap=False).on("cuda:0")
    assert not fits_device_step(target, draft("head"), step_by_step)


def test_a_named_planner_is_taken_at_its_word() -> None:
    for name in ("verify_all", "threshold", "causal_greedy", "lagged_top_k"):
        config = EngineConfig(speculation=SpeculationConfig(planner=name))
        assert resolve_planner(config, None) == name
        assert resolve_planner(config, draft("head")) == name


@pytest.mark.parametrize("drafter", [draft(None), NGramDrafter()])
@pytest.mark.parametrize("name", ["threshold", "causal_greedy", "lagged_top_k"])
def test_a_planner_without_confidences_to_go_by_is_refused(drafter: Any, name: Any) -> None:
    config = EngineConfig(speculation=SpeculationConfig(planner=name))
    with pytest.raises(ModelError, match=f"planner {name} .* say verify_all"):
        resolve_planner(config, drafter)


def test_costs_come_from_the_file_first_then_from_the_machine(tmp_path: Path) -> None:
    def find(_engine: Engine) -> StepCosts:
        raise AssertionError("measured though a file was named")

    table = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [9, 5], "max_batch_tokens": 8}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(table))
    named = SpeculationConfig(step_costs=str(file))
    found = planner_costs("causal_greedy", named, NO_ENGINE, find)
    assert found is not None
    assert [tokens for _, tokens, _ in found.target][-1] == 8
    plain = SpeculationConfig()
    assert planner_costs("lagged_top_k", plain, NO_ENGINE, lambda _: COSTS) is COSTS
    assert planner_costs("verify_all", plain, NO_ENGINE, find) is None
    assert planner_costs("threshold", plain, NO_ENGINE, find) is None


def test_a_planner_is_made_by_its_name() -> None:
    settings = SpeculationConfig()
    assert isinstance(make_planner("causal_greedy", settings, COSTS), CausalGreedy)
    assert isinstance(make_planner("lagged_top_k", settings, COSTS), LaggedTopK)
    assert isinstance(make_planner("verify_all", settings, None), VerifyAll)
    assert isinstance(make_planner("threshold", settings, None), Threshold)


def test_costs_that_nobody_reads_are_refused() -> None:
    given = SpeculationConfig(step_costs="costs.json")
    with pytest.raises(ModelError, match="step_costs"):
        planner_costs("verify_all", given, NO_ENGINE, None)


def test_a_scheduled_planner_without_costs_is_refused() -> None:
    with pytest.raises(ModelError, match="step_costs"):
        planner_costs("causal_greedy", SpeculationConfig(), NO_ENGINE, None)


def test_a_machine_that_cannot_be_measured_is_an_error_of_the_settings() -> None:
    def find(_engine: Engine) -> StepCosts:
        raise ValueError("no room to measure a step")

    with pytest.raises(ModelError, match="no room to measure a step"):
        planner_costs("causal_greedy", SpeculationConfig(), NO_ENGINE, find)


def test_what_a_planner_goes_by_is_told_without_folders() -> None:
    told = planning("causal_greedy", SpeculationConfig(step_costs="/some/where/costs.json"))
    assert told == {"step_costs": "costs.json", "threshold": None}
    assert planning("lagged_top_k", SpeculationConfig())["step_costs"] == "measured here"
    told = planning("threshold", SpeculationConfig(planner="threshold", threshold=0.4))
    assert told == {"step_costs": None, "threshold": 0.4}
