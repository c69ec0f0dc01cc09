"""Records of a batch whose requests ask for different things: each as if it were alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emberline.engine.scoring import SCORED_BYTES, SCORED_ON_CPU, most_scored
from emberline.types import Request, SamplingParams

from support.engines import ask, make_engine, run
from support.paged import PrefixDrafter, PrefixTarget

VOCAB = 64
BASE = SamplingParams(max_tokens=16, seed=11, ignore_eos=True)
OPTIONS = {
    "nothing": BASE,
    "raw": replace(BASE, logprobs=3),
    "processed": replace(BASE, logprobs=2, logprobs_mode="processed"),
    "both": replace(BASE, logprobs=1, logprobs_mode="both"),
    "everything": replace(BASE, logprobs=-1),
    "many": replace(BASE, logprobs=40, logprob_token_ids=(3, 60)),
    "ids": replace(BASE, logprobs=0, logprob_token_ids=(5, 6)),
    "warm": replace(BASE, logprobs=4, logprobs_mode="both", temperature=0.7),
    "greedy": replace(BASE, logprobs=33, temperature=0.0, logprobs_mode="both"),
}


def engine(**options):
    target = PrefixTarget(VOCAB)
    return make_engine(target, PrefixDrafter(target, 4, wrong_every=3), max_num_reqs=16, **options)


@pytest.mark.parametrize("names", [list(OPTIONS), ["raw", "both", "processed"], ["many", "raw"]])
def test_a_batch_of_different_wishes(names):
    requests = [Request(name, (3, 4, 5), OPTIONS[name]) for name in names]
    together = run(engine(), requests)
    for name in names:
        alone = ask(engine(), (3, 4, 5), OPTIONS[name])
        assert together[name].token_ids == alone.token_ids
        assert together[name].logprobs == alone.logprobs, name


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_both_is_raw_beside_processed(temperature):
    params = replace(BASE, logprobs=5, temperature=temperature)
    raw = ask(engine(), (3, 4), params).logprobs
    processed = ask(engine(), (3, 4), replace(params, logprobs_mode="processed")).logprobs
    both = ask(engine(), (3, 4), replace(params, logprobs_mode="both")).logprobs
    assert [record._replace(processed=None) for record in both] == raw
    assert [record.processed for record in both] == processed
    assert (raw == processed) == (temperature != 0.7)


def test_what_all_of_the_vocabulary_costs_others_nothing(monkeypatch):
    """Rows of those who want little are not searched as deep as the widest."""
    from emberline.engine import scoring

    depths = []
    score = scoring.score_tokens

    def noting(logits, index, token_ids, num_top):
        depths.append((num_top, len(index)))
        return score(logits, index, token_ids, num_top)

    monkeypatch.setattr(scoring, "score_tokens", noting)
    few = [Request(f"{i}", (3, 4, 5), replace(BASE, logprobs=i)) for i in range(4)]
    run(engine(), [*few, Request("all", (3, 4, 5), OPTIONS["everything"])])
    assert {depth for depth, _ in depths} == {3, VOCAB}
    assert sum(count for depth, count in depths if depth == VOCAB) == 16
    assert sum(count for depth, count in depths if depth == 3) == 64


@pytest.mark.parametrize("vocab_size", [512, 49_152, 151_936, 2**31])
def test_a_gpu_scores_as_many_prompt_tokens_a_step_as_their_logits_leave_room_for(vocab_size):
    many = most_scored(vocab_size, torch.device("cuda", 1))
    assert many >= SCORED_ON_CPU
    assert many == SCORED_ON_CPU or many * vocab_size * 4 <= SCORED_BYTES
    assert most_scored(vocab_size, torch.device("cpu")) == SCORED_ON_CPU
