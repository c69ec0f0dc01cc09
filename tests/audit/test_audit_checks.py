"""Each check passes a right server of either dialect and fails one that is wrong in its way."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from rich.console import Console

from emberline.audit.checks import CHECKS
from emberline.audit.outcome import Outcome, Verdict
from emberline.audit.records import Alternative, TokenRecord
from emberline.audit.report import as_json, table
from emberline.audit.run import Audit, audit, chosen
from emberline.audit.settings import AuditError, AuditSettings

from support.scripted_lm import ScriptedLM, scripted_server

LACKING = {"processed", "speculation_off", "reference", "compare"}


class Silent:
    def begins(self, *_: object) -> None: ...

    def ends(self, *_: object) -> None: ...


def run(lm: ScriptedLM, *names: str, reference: Any = None, **given: Any) -> Audit:
    small = {"num_tokens": 8, "num_prompts": 2, "num_samples": 512, "dtype": "float32"}
    with scripted_server(lm) as server:
        settings = AuditSettings(url=server.url, **{**small, **given})
        return asyncio.run(audit(settings, Silent(), checks=chosen(names, ()), reference=reference))


def outcome(lm: ScriptedLM, name: str, **given: Any) -> Outcome:
    return run(lm, name, **given).results[0].outcome


@pytest.mark.parametrize("api", ["openai", "native"])
def test_a_right_server_passes(api):
    result = run(ScriptedLM(), api=api)
    verdicts = {one.check.name: one.outcome.verdict for one in result.results}
    assert result.passed, [f.message for one in result.results for f in one.outcome.findings]
    lacking = LACKING | ({"chat_shapes"} if api == "native" else set())
    assert {name for name, v in verdicts.items() if v is not Verdict.PASS} == lacking
    assert verdicts["processed"] is Verdict.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("no bias", "logit_bias", "other tokens"),
        ("no penalties", "penalties", "once the tokens before it are counted"),
        ("no seeds", "seeds", "seed 1, again"),
        ("drift", "cached_prefix", "apart"),
        ("drift", "batch", "beside others"),
        ("drift", "streaming", "apart"),
        ("lossy", "distribution", "chi-square"),
        ("NaN", "shapes", "finite"),
        ("unsorted", "chat_shapes", "not sorted"),
        ("other ids", "token_ids", "beside others"),
        ("biased values", "raw_invariance", "logit_bias"),
        ("other greedy", "speculation_off", "token 2"),
        ("two floats", "top_entry", "output token"),
        ("wrong token", "top_entry", "output token"),
        ("crash", "logit_bias", "500: out of order"),
    ],
)
def test_a_wrong_server_fails(fault, check, words):
    found = outcome(ScriptedLM(faults={fault}, speculates=True), check, num_tokens=24)
    assert found.verdict is Verdict.FAIL
    assert any(words in finding.message for finding in found.findings), found.findings


def test_seeds_that_are_ignored_are_found_whatever_the_noise():
    found = outcome(ScriptedLM(faults={"no seeds"}), "seeds", num_tokens=24, dtype="bfloat16")
    assert found.verdict is Verdict.FAIL
    assert any("seed 1, again" in finding.message for finding in found.findings)
    assert not any("beside others:" in finding.message for finding in found.findings)
    assert "parted as noise" in found.note


@pytest.mark.parametrize("lenient", [False, True])
def test_what_a_server_lacks_is_no_failure(lenient):
    result = run(ScriptedLM(openai_only=True, faults={"no ids"}, lenient=lenient))
    verdicts = {one.check.name: one.outcome.verdict for one in result.results}
    assert Verdict.FAIL not in verdicts.values()
    for name in ("rescoring", "cached_prefix", "distribution", "logit_bias"):
        assert verdicts[name] is Verdict.NOT_SUPPORTED
    for name in ("shapes", "chat_shapes", "counts", "top_entry", "streaming", "batch", "seeds"):
        assert verdicts[name] is Verdict.PASS
    note = next(one.outcome.note for one in result.results if one.check.name == "rescoring")
    assert "return_tokens_as_token_ids" in note


def test_a_refused_field_is_not_supported_in_the_servers_words():
    found = outcome(ScriptedLM(refuses={"frequency_penalty"}), "penalties")
    assert found.verdict is Verdict.NOT_SUPPORTED
    assert found.note == "the server said 400: unknown field frequency_penalty"


@pytest.mark.parametrize(
    ("refused", "check", "note"),
    [
        ("stop_token_ids", "counts", "; without stop id"),
        ("messages", "counts", "; without chat: the server said 400"),
        ("messages", "streaming", "; without chat: the server said 400"),
    ],
)
def test_a_part_that_is_not_supported_leaves_the_rest(refused, check, note):
    found = outcome(ScriptedLM(refuses={refused}), check)
    assert found.verdict is Verdict.PASS
    assert note in found.note


def test_two_servers():
    with (
        scripted_server(ScriptedLM(faults={"drift"})) as other,
        scripted_server(ScriptedLM()) as one,
    ):
        for url, verdict in ((one.url, Verdict.PASS), (other.url, Verdict.FAIL)):
            settings = AuditSettings(
                url=one.url, compare=url, num_tokens=8, num_prompts=2, dtype="float32"
            )
            for _ in range(2):  # a drifting server drifts the second time it is asked
                result = asyncio.run(audit(settings, Silent(), checks=chosen(["compare"], ())))
            assert result.results[0].outcome.verdict is verdict


class HalfRight:
    """Stands for a model whose values are off, or whose two best tokens are nearly tied."""

    name = "half"

    def __init__(self, off: float, lead: float | None = None) -> None:
        self.off, self.lead = off, lead

    def rows(self, ids, first, num_top):
        from support.scripted_lm import VOCAB, log_softmax, logits_after

        rows = []
        for i in range(first, len(ids)):
            row = log_softmax(logits_after(tuple(ids[i - 2 : i])))
            value = row[ids[i]] + self.off
            best = max(range(VOCAB), key=lambda k: row[k])
            top = Alternative(best, row[best] + self.off)
            if self.lead is not None and best == ids[i]:
                top = Alternative((best + 1) % VOCAB, value + self.lead)
            rows.append(TokenRecord(ids[i], value, (top,)))
        return tuple(rows)


@pytest.mark.parametrize(
    ("half", "verdict", "ties"),
    [
        (HalfRight(0.0), Verdict.PASS, 0),
        (HalfRight(0.01), Verdict.FAIL, 0),
        (HalfRight(0.0, 1e-4), Verdict.PASS, 16),
        (HalfRight(0.0, 0.1), Verdict.FAIL, 0),
    ],
)
def test_a_reference_and_near_ties(half, verdict, ties):
    found = run(ScriptedLM(), "reference", reference=half).results[0].outcome
    assert found.verdict is verdict
    assert found.figures["near_ties"] == ties
    assert found.figures["max"] == pytest.approx(half.off, abs=1e-9)


def test_noise_is_the_dtypes_unless_said():
    assert run(ScriptedLM(), "top_entry", dtype="auto").noise.most == 1e-4  # as the server says
    assert run(ScriptedLM(), "top_entry", dtype="bfloat16").noise.most == 0.5
    assert run(ScriptedLM(), "top_entry", exact=True).noise.most == 0.0
    drifting = ScriptedLM(faults={"drift"})
    assert outcome(drifting, "streaming", tolerance=0.1).verdict is Verdict.PASS


def test_reports():
    result = run(ScriptedLM(faults={"no bias"}), "logit_bias", "top_entry")
    shown = as_json(result)
    json.dumps(shown, allow_nan=False)
    assert not shown["passed"]
    assert shown["checks"]["top_entry"]["verdict"] == "pass"
    first = shown["checks"]["logit_bias"]["findings"][0]
    assert first["reproduce"]["logit_bias"]
    assert first["reproduce"]["prompt"]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table(result))
    text = console.export_text()
    assert "logit_bias should show that" in text
    assert "1 pass, 1 fail" in text


def test_checks_have_names_of_their_own():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    with pytest.raises(AuditError, match="--only nothing: the checks are shapes"):
        chosen(["nothing"], [])
    assert [check.name for check in chosen([], ["shapes"])] == [c.name for c in CHECKS[1:]]


@pytest.mark.parametrize(
    "given",
    [
        {"url": "localhost:8000"},
        {"tolerance": -1.0},
        {"num_tokens": 1},
        {"num_prompts": 1},
        {"timeout": 0.0},
    ],
)
def test_settings_that_cannot_be(given):
    with pytest.raises(AuditError):
        AuditSettings(**{"url": "http://x", **given})
