"""The kit passes a right server and names each of eight faults by its check and its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from emberline.audit.outcome import Fault, Verdict
from emberline.audit.run import Audit, audit, chosen
from emberline.audit.settings import AuditSettings

from support.sabotage import Sabotage, sabotaged_server

FAULTS = [
    ("row shifted", "rescoring", Fault.ROW_SHIFTED),
    ("row shifted back", "rescoring", Fault.ROW_SHIFTED),
    ("neighbour", "rescoring_concurrent", Fault.NEIGHBOUR),
    ("zero row", "rescoring", Fault.ZERO_ROW),
    ("zero row", "shapes", Fault.ZERO_ROW),
    ("draft", "rescoring", Fault.DRAFT),
    ("residual", "rescoring", Fault.RESIDUAL),
    ("past stop", "counts", Fault.PAST_STOP),
    ("repeated alternatives", "streaming", Fault.REPEATED),
    ("temperature", "processed", Fault.TEMPERATURE),
    ("temperature", "temperature", Fault.TEMPERATURE),
]


class Silent:
    def begins(self, *_: object) -> None: ...

    def ends(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def sabotage() -> Iterator[Sabotage]:
    with pytest.MonkeyPatch.context() as patch, sabotaged_server(patch) as state:
        yield state


def run(url: str, *names: str) -> Audit:
    settings = AuditSettings(
        url=url, exact=True, num_tokens=16, num_prompts=2, num_samples=128, block=5
    )
    return asyncio.run(audit(settings, Silent(), checks=chosen(names, ())))


def test_nothing_is_wrong_with_a_right_server(sabotage):
    result = run(sabotage.server.url)
    verdicts = {one.check.name: one.outcome.verdict for one in result.results}
    notes = [line.message for one in result.results for line in one.outcome.findings]
    assert result.passed, notes
    assert {name for name, verdict in verdicts.items() if verdict is not Verdict.PASS} == {
        "reference",
        "compare",
    }
    assert verdicts["reference"] is verdicts["compare"] is Verdict.SKIPPED
    sabotage.server.rest()


@pytest.mark.parametrize(("fault", "check", "kind"), FAULTS)
def test_a_fault_is_reported_by_check_and_kind(sabotage, fault, check, kind):
    with sabotage.on(fault):
        result = run(sabotage.server.url, check)
    (one,) = result.results
    assert not result.passed
    assert one.outcome.verdict is Verdict.FAIL
    assert one.outcome.faults == (kind,), [f.message for f in one.outcome.findings[:5]]
    named = [finding for finding in one.outcome.findings if finding.fault is kind]
    for finding in named:
        assert "output token" in finding.message or "records" in finding.message
    assert any(finding.reproduce.get("output") for finding in named) or check == "shapes"


def test_values_of_drafts_are_no_fault_of_greedy_tokens_alone(sabotage):
    """The check that a fault is for is the one that sees it: the others are not fooled."""
    with sabotage.on("repeated alternatives"):
        result = run(sabotage.server.url, "counts", "top_entry", "seeds")
    assert result.passed
