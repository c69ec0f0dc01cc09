"""The benchmark of requests that come and go, over an engine that runs no model."""

from __future__ import annotations

import pytest

from emberline.engine import scheduler

from gpu import rollout
from gpu.rollout import PER_PLACE, VARIANTS, as_asked, measure, run
from gpu.workload import SCHEDULED
from support.offline import offline

PROMPTS = [(5, 6, 7), (8, 9), (10, 11, 12, 13)]


def test_variants_answer_alike_and_start_requests_as_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "LENGTHS", (3, 30))
    llm, loaded = offline(monkeypatch)
    loaded.engine.info["planner"] = "verify_all"
    row = measure(llm, PROMPTS, 2, 1)
    assert list(row["tok_s"]) == ["none", "scheduled, at once", "verify_all", "scheduled"]
    assert all(rate > 0 for rate in row["tok_s"].values())
    planner = loaded.engine.parts.planner
    usual = scheduler.MOST_GATHERING
    for variant in VARIANTS:
        with as_asked(loaded.engine, variant):
            assert (scheduler.MOST_GATHERING > 0) == variant.gathers
            assert (loaded.engine.parts.planner is planner) == (variant.policy == SCHEDULED)
        before = loaded.engine.snapshot()
        assert run(llm, PROMPTS, 2 * PER_PLACE, variant) > 0
        drafted = loaded.engine.snapshot().num_draft_tokens - before.num_draft_tokens
        assert (drafted > 0) == variant.draft
    assert usual == scheduler.MOST_GATHERING
    assert loaded.engine.parts.planner is planner
