"""The figures of an evaluation: what counts, the rates, and how sure they are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from emberline.engine.record import record
from emberline.engine.trace import BlockTrace
from emberline.evaluate.figures import RESAMPLES, count, ratio, resample, summarise
from emberline.evaluate.measure import Answer, judged, read_sets
from emberline.evaluate.report import Drafted, as_json, markdown, tables
from emberline.types import InvalidRequest, Request, SamplingParams

from support.doubles import Prefix, ScriptedDrafter
from support.engines import make_engine
from support.paged import PrefixTarget

DRAFTS = 4


def block(verified: int, accepted: int, *confidence: float) -> BlockTrace:
    return BlockTrace("r", confidence, verified, accepted)


def answer(
    *blocks: BlockTrace, name: str = "a", prompt: int = 0, steps: int = 2, emitted: int = 4
) -> Answer:
    return Answer(name, prompt, 0.0, steps, emitted, blocks)


def test_rates_count_verified_drafts_alone() -> None:
    blocks = [block(4, 4), block(4, 2), block(4, 0), block(2, 2), block(1, 0), block(0, 0)]
    found = count([answer(*blocks[:3]), answer(*blocks[3:])], 4)
    assert found.verified == (5, 4, 3, 3)
    assert found.reached == (5, 3, 2, 1)  # the block cut at 2 never came to draft 3
    assert found.accepted == (3, 3, 1, 1)
    assert found.conditional == (3 / 5, 1.0, 1 / 2, 1.0)
    assert found.marginal == (3 / 5, 3 / 4, 1 / 3, 1 / 3)
    assert count([answer(block(1, 1))], 2).conditional == (1.0, None)


def test_what_lies_behind_the_end_of_an_answer_is_nobodys() -> None:
    """Every draft is right, and the answer ends at each place of a block in turn."""
    target = PrefixTarget()
    line = target.greedy([5, 1], 14)

    def guess(prefix: Prefix) -> int:
        return int(target.logits_after(list(prefix)).argmax())

    ends = set()
    for end in range(2, 12):
        stop = line[end]
        if stop in line[:end]:
            continue
        drafter = ScriptedDrafter(DRAFTS, None, guess, confidence=None)
        engine = make_engine(target, drafter, eos_ids=())
        params = SamplingParams(temperature=0, max_tokens=14, stop_token_ids=(stop,))
        [done] = record(engine, [Request("r", (5, 1), params)])
        assert list(done.token_ids) == line[: end + 1]
        blocks = judged(done)
        found = count([answer(*blocks)], DRAFTS)
        assert found.reached == found.accepted == found.verified
        assert sum(found.accepted) == done.stats.num_accepted
        ends.add(blocks[-1].num_verified)
    assert len(ends) >= 3  # ends in the middle of blocks among them


def test_a_rejected_last_draft_stays_rejected() -> None:
    target = PrefixTarget()

    def wrong(prefix: Prefix) -> int:
        return (int(target.logits_after(list(prefix)).argmax()) + 1) % target.vocab_size

    engine = make_engine(target, ScriptedDrafter(DRAFTS, None, wrong, confidence=None), eos_ids=())
    params = SamplingParams(temperature=0, max_tokens=12)
    [done] = record(engine, [Request("r", (5, 1), params)])
    assert judged(done) == done.blocks
    found = count([answer(*judged(done))], DRAFTS)
    assert found.accepted == (0,) * DRAFTS
    assert found.conditional[0] == 0.0


def test_macro_is_the_mean_of_sets_and_not_of_steps() -> None:
    answers = [
        answer(name="a", prompt=0, steps=10, emitted=30),
        answer(name="a", prompt=1, steps=30, emitted=50),
        answer(name="b", prompt=0, steps=4, emitted=16),
    ]
    found = summarise(answers, DRAFTS)
    assert found.sets["a"].length == 2.0
    assert found.sets["b"].length == 4.0
    assert found.macro == 3.0
    assert found.everything.length == 96 / 44
    assert found.sets["b"].standard_error == 0.0  # one prompt says nothing of the spread


def test_without_a_step_there_is_no_length() -> None:
    answers = [answer(name="a", steps=0, emitted=0), answer(name="b")]
    found = summarise(answers, DRAFTS)
    assert found.sets["a"].length is None
    assert found.macro is None
    assert ratio(found, found) is None
    text = markdown(tables([Drafted("d", {}, {0.0: found})]))
    assert "| d | - | 2.00 | - |" in text


def test_the_standard_error_is_that_of_a_mean_over_prompts() -> None:
    rng = np.random.default_rng(3)
    emitted = rng.integers(20, 60, size=50)
    answers = [answer(prompt=i, steps=10, emitted=int(e)) for i, e in enumerate(emitted)]
    draws = resample(answers, "a", 0)
    assert len(draws) == RESAMPLES
    known = (emitted / 10).std() / math.sqrt(50)
    assert draws.std() == pytest.approx(known, rel=0.06)
    assert draws.mean() == pytest.approx(emitted.mean() / 10, abs=3 * known / math.sqrt(RESAMPLES))
    assert np.array_equal(draws, resample(answers, "a", 0))
    assert not np.array_equal(draws, resample(answers, "a", 1))


def test_a_ratio_is_of_the_same_prompts() -> None:
    """Prompts differ widely, and the second draft is always a quarter longer: a sure ratio."""
    rng = np.random.default_rng(5)
    emitted = rng.integers(20, 100, size=30)
    base = [answer(prompt=i, steps=20, emitted=int(e) * 4) for i, e in enumerate(emitted)]
    more = [answer(prompt=i, steps=20, emitted=int(e) * 5) for i, e in enumerate(emitted)]
    first, second = (summarise(part, DRAFTS) for part in (base, more))
    assert first.macro_error is not None
    assert first.macro_error > 0.1
    assert ratio(second, first) == (pytest.approx(1.25), pytest.approx(0.0, abs=1e-12))


def test_confidences_are_judged_as_the_engine_used_them() -> None:
    sure = [block(2, 2, 0.9, 0.9), block(2, 0, 0.9, 0.9)] * 10
    found = summarise([answer(*sure)], 2).everything.confidence
    assert found is not None
    assert found.ece == (pytest.approx(0.4), pytest.approx(abs(0.81 - 0.5)))
    ordered = [block(1, 1, 0.8), block(1, 0, 0.3)] * 10
    found = summarise([answer(*ordered)], 2).everything.confidence
    assert found is not None
    assert found.auc[0] == 1.0
    assert math.isnan(found.auc[1])
    assert summarise([answer(block(2, 1))], 2).everything.confidence is None


def test_the_report_says_what_was_found() -> None:
    one = summarise([answer(block(2, 2, 0.9, 0.9), block(2, 1, 0.5, 0.5))], 2)
    two = summarise([answer(block(2, 1), steps=4, emitted=6)], 2)
    drafts = [Drafted("one", {"k": 1}, {0.0: one}), Drafted("t|o", {}, {0.0: two})]
    said = as_json(drafts, {"seed": 0})
    row = said["drafts"]["one"]["T=0"]["sets"]["a"]
    assert row["acceptance_length"] == 2.0
    assert row["conditional_acceptance"] == [1.0, 0.5]
    assert (row["reached"], row["accepted"]) == ([2, 2], [2, 1])
    assert row["auc"] == [None, 1.0]
    assert said["drafts"]["t|o"]["T=0"]["over_first"] == {"ratio": 0.75, "standard_error": 0.0}
    assert "ece" not in said["drafts"]["t|o"]["T=0"]["all"]
    text = markdown(tables(drafts), ["A note."])
    assert "| draft | a | mean | over one |" in text
    assert "| t\\|o | 1.50 | 1.50 ± 0.00 | 0.750 ± 0.000 |" in text
    assert "| one, AUC | - | 1.000 |" in text
    assert text.endswith("\n\nA note.\n")


def test_sets_are_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}1"}}\n{{"prompt": "2"}}\n')
    (tmp_path / "notes.txt").write_text("no set")
    assert [part.name for part in read_sets(tmp_path)] == ["a", "b", "c"]
    picked = read_sets(tmp_path, ["c", "a"], first=1)
    assert [(part.name, len(part.conversations)) for part in picked] == [("c", 1), ("a", 1)]
    [alone] = read_sets(tmp_path / "b.jsonl")
    assert (alone.name, alone.conversations[0].text) == ("b", "b1")
    with pytest.raises(InvalidRequest, match=r"has no set 'd': it has a, b, c"):
        read_sets(tmp_path, ["d"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"holds no \*\.jsonl"):
        read_sets(tmp_path / "empty")
