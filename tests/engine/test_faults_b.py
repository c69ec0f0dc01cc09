"""Log-probabilities beside drafts, in whole engines: faults by their numbers in docs/faults.md."""

from __future__ import annotations

import pytest
from torch import Tensor

from emberline.types import Request, SamplingParams
from emberline.verify.planner import Threshold

from support.engines import ask, make_engine, run
from support.paged import PrefixDrafter, PrefixTarget

PROMPT = [5, 9, 3, 7, 2]


class Coarse(PrefixTarget):
    """Logits of few values, so that most tokens have equals."""

    def logits_after(self, prefix: list[int]) -> Tensor:
        return super().logits_after(prefix).round()


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 0},
        {"logprobs": 5, "logprobs_mode": "both", "annotations": True},
        {"logprobs": 1, "logprob_token_ids": (3, 4)},
        {"prompt_logprobs": 2},
    ],
    ids=lambda wish: " ".join(wish),
)
def test_asking_for_logprobs_changes_no_count_of_drafts(wish):
    """B08: drafting goes on as before, whatever is asked for."""
    target = PrefixTarget()

    def asked(**more):
        drafter = PrefixDrafter(target, 6, wrong_every=4, doubt_every=5)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **more)
        return ask(make_engine(target, drafter, planner=Threshold(0.5)), PROMPT, params)

    plain, scored = asked(), asked(**wish)
    assert scored.token_ids == plain.token_ids
    assert scored.last.stats == plain.last.stats
    assert plain.last.stats.num_accepted > 20


def test_tied_tokens_have_one_rank_on_every_path():
    """B14: drawn in decode, in a verify step or scored as a prompt, equals share a rank."""
    target = Coarse(scale=1.0)
    params = SamplingParams(
        temperature=1.2, seed=3, max_tokens=40, ignore_eos=True, logprobs=4, accept="coupled"
    )
    paths = {}
    for name, drafter in (("decode", None), ("verify", PrefixDrafter(target, 5, noise=1.0))):
        answer = ask(make_engine(target, drafter), PROMPT, params)
        paths[name] = answer.logprobs
    ids = [record.token_id for record in paths["decode"]]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=4)
    request = Request("s", (*PROMPT, *ids), scored)
    prompt = run(make_engine(target, prefill_chunk=7), [request])["s"].last.prompt_logprobs
    assert prompt is not None
    paths["prompt"] = list(prompt[len(PROMPT) :])
    prefix, num_tied = list(PROMPT), 0
    for position, token_id in enumerate(ids):
        row = target.logits_after(prefix)
        expected = 1 + int((row > row[token_id]).sum())
        num_tied += int((row == row[token_id]).sum()) > 1
        found = [records[position] for records in paths.values()]
        assert [record.rank for record in found] == [expected] * 3
        assert len({record.top_ids for record in found}) == 1
        prefix.append(token_id)
    assert num_tied > 20
