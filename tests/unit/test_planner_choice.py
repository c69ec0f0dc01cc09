"""Which planner an engine gets, and what it needs for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from emberline.config import EngineConfig, SchedulerConfig, SpeculationConfig
from emberline.drafters.dspark import DSparkDrafter
from emberline.drafters.ngram import NGramDrafter
from emberline.engine.build import make_planner, planning, resolve_planner
from emberline.engine.engine import Engine
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
        (draft("head"), 16, "causal_greedy"),
        (draft("head"), 1, "verify_all"),
        (draft(None), 16, "verify_all"),
        (NGramDrafter(), 16, "verify_all"),
        (None, 16, "verify_all"),
    ],
)
def test_auto_schedules_where_there_is_something_to_schedule(
    drafter: Any, max_num_reqs: int, expected: str
) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_reqs=max_num_reqs))
    assert resolve_planner(config, drafter) == expected


def test_a_named_planner_is_taken_at_its_word() -> None:
    for name in ("verify_all", "threshold", "causal_greedy", "lagged_top_k"):
        config = EngineConfig(speculation=SpeculationConfig(planner=name))
        assert resolve_planner(config, None) == name


def test_costs_come_from_the_file_first_then_from_the_machine(tmp_path: Path) -> None:
    def find(_engine: Engine) -> StepCosts:
        raise AssertionError("measured though a file was named")

    table = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [9, 5], "max_batch_tokens": 8}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(table))
    named = SpeculationConfig(step_costs=str(file))
    assert isinstance(make_planner("causal_greedy", named, NO_ENGINE, find), CausalGreedy)
    plain = SpeculationConfig()
    measured = make_planner("lagged_top_k", plain, NO_ENGINE, lambda _: COSTS)
    assert isinstance(measured, LaggedTopK)
    assert isinstance(make_planner("verify_all", plain, NO_ENGINE, find), VerifyAll)
    assert isinstance(make_planner("threshold", plain, NO_ENGINE, find), Threshold)


def test_costs_that_nobody_reads_are_refused() -> None:
    with pytest.raises(ModelError, match="step_costs"):
        make_planner("verify_all", SpeculationConfig(step_costs="costs.json"), NO_ENGINE, None)


def test_a_scheduled_planner_without_costs_is_refused() -> None:
    with pytest.raises(ModelError, match="step_costs"):
        make_planner("causal_greedy", SpeculationConfig(), NO_ENGINE, None)


def test_a_machine_that_cannot_be_measured_is_an_error_of_the_settings() -> None:
    def find(_engine: Engine) -> StepCosts:
        raise ValueError("no room to measure a step")

    with pytest.raises(ModelError, match="no room to measure a step"):
        make_planner("causal_greedy", SpeculationConfig(), NO_ENGINE, find)


def test_what_a_planner_goes_by_is_told_without_folders() -> None:
    told = planning("causal_greedy", SpeculationConfig(step_costs="/some/where/costs.json"))
    assert told == {"step_costs": "costs.json", "threshold": None}
    assert planning("lagged_top_k", SpeculationConfig())["step_costs"] == "measured here"
    told = planning("threshold", SpeculationConfig(planner="threshold", threshold=0.4))
    assert told == {"step_costs": None, "threshold": 0.4}
