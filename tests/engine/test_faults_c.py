"""What speculation must not change, in whole engines: faults by their numbers in docs/faults.md."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from emberline.drafters.ngram import NGramDrafter
from emberline.engine.detokenizer import TokenText
from emberline.engine.grammar import GrammarCompiler
from emberline.types import FinishReason, Grammar, Request, SamplingParams

from support.engines import EOS, Answer, ask, collect, make_engine, run
from support.grammars import RuleMatcher
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget
from support.serving import make_tokenizer

PROMPT = [5, 9, 3, 7, 2]


class Looping(PrefixTarget):
    """Goes round 20, 21, 22 for ever; six tokens, then EOS, are nearly as likely."""

    def logits_after(self, prefix: list[int]) -> Tensor:
        row = torch.zeros(self.vocab_size)
        row[10:16] = 0.95
        row[EOS] = 0.9
        row[20 + (prefix[-1] + 1 - 20) % 3] = 1.0
        return row


@pytest.mark.parametrize("name", ["none", "block", "lookup", "constant"])
def test_a_repetition_penalty_breaks_a_loop_that_every_draft_continues(name):
    """C13: the drafts are those of the loop, and all would be accepted without the penalty."""
    target = Looping()
    drafter = {
        "none": None,
        "block": PrefixDrafter(target, 7),
        "lookup": NGramDrafter(4),
        "constant": ConstantDrafter(20, 4),
    }[name]

    def asked(**options: float):
        params = SamplingParams(temperature=0, max_tokens=60, **options)
        return ask(make_engine(target, drafter), [20], params)

    assert asked().last.finish_reason is FinishReason.LENGTH
    broken = asked(repetition_penalty=1.15)
    assert broken.token_ids == [21, 22, *range(10, 16), EOS]
    assert broken.last.finish_reason is FinishReason.STOP


class EndsAtOnce(PrefixTarget):
    """EOS is the best token everywhere."""

    def logits_after(self, prefix: list[int]) -> Tensor:
        row = super().logits_after(prefix).clone()
        row[EOS] = 50.0
        return row


class NeverEnds(PrefixTarget):
    """The same without EOS: what comes while EOS is barred."""

    def logits_after(self, prefix: list[int]) -> Tensor:
        row = super().logits_after(prefix).clone()
        row[EOS] = -50.0
        return row


@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_min_tokens_counts_tokens_of_whole_accepted_blocks(num_drafts):
    """C11, C16: EOS comes as soon as it may, with requests that do not draft among the others."""
    drafter = PrefixDrafter(NeverEnds(), num_drafts)
    requests = [
        Request(
            f"r{least}",
            tuple(PROMPT),
            SamplingParams(
                temperature=0, max_tokens=40, min_tokens=least, speculate=least % 3 > 0, logprobs=0
            ),
        )
        for least in range(14)
    ]
    answers = run(make_engine(EndsAtOnce(), drafter, max_num_reqs=14), requests)
    path = NeverEnds().greedy(PROMPT, 14)
    for least in range(14):
        answer = answers[f"r{least}"]
        assert answer.token_ids == [*path[:least], EOS]
        assert answer.last.finish_reason is FinishReason.STOP
    assert answers["r13"].last.stats.num_accepted > 5


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_a_banned_phrase_never_straddles_the_border_of_a_block(num_drafts):
    """C19: phrases of two tokens at every place of the greedy path, banned one at a time."""
    target = PrefixTarget()
    path = target.greedy(PROMPT, 14)
    for place in (0, 3, 4, 7, 8):
        phrase = path[place : place + 2]
        params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, bad_words=[phrase])
        plain = ask(make_engine(target), PROMPT, params)
        drafted = ask(make_engine(target, PrefixDrafter(target, num_drafts)), PROMPT, params)
        assert drafted.token_ids == plain.token_ids
        assert tuple(phrase) not in pairwise(plain.token_ids)
        assert plain.token_ids[: place + 1] == path[: place + 1]


class Coarse(PrefixTarget):
    """Logits of few values, so that the best token has equals."""

    def logits_after(self, prefix: list[int]) -> Tensor:
        return super().logits_after(prefix).clamp(max=1.0)


def test_a_greedy_request_stays_at_the_lowest_of_equals_beside_sampled_ones():
    """C29: whatever is drawn next to it, with and without drafts."""
    target = Coarse()
    prefix = list(PROMPT)
    for _ in range(20):
        row = target.logits_after(prefix)
        assert int((row == row.max()).sum()) > 1
        prefix.append(int((row == row.max()).nonzero()[0]))
    for drafter in (None, PrefixDrafter(target, 4, noise=1.0)):
        for seed in range(2):
            sampled = [
                Request(
                    f"s{i}",
                    tuple(PROMPT),
                    SamplingParams(temperature=1.0, seed=8 * seed + i, max_tokens=20, top_k=4 * i),
                )
                for i in range(7)
            ]
            greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            victim = Request("greedy", tuple(PROMPT), greedy)
            answers = run(make_engine(target, drafter), [*sampled, victim])
            assert answers["greedy"].token_ids == prefix[len(PROMPT) :]


def test_a_preempted_request_goes_on_where_its_grammar_stands():
    """C36: pages for about one and a half; the drafts that it had are gone with its pages."""
    tokenizer = make_tokenizer()
    size, eos = len(tokenizer), int(tokenizer.eos_token_id)
    requests = [
        Request(
            f"r{i}",
            tuple(range(10 + i, 30 + i)),
            SamplingParams(
                temperature=float(i % 2),
                seed=i,
                max_tokens=60,
                grammar=Grammar("regex", f"[a-{'mz'[i % 2]}]{{{20 + i}}}(!|\\?)"),
            ),
            priority=i % 3,
        )
        for i in range(8)
    ]

    def engine(num_drafts: int, num_pages: int):
        target = PrefixTarget(vocab_size=size, max_model_len=128, num_slots=8192)
        drafter = PrefixDrafter(target, num_drafts, wrong_every=3) if num_drafts else None
        made = make_engine(target, drafter, eos_ids=[eos], num_pages=num_pages)
        made.grammars = GrammarCompiler(tokenizer, size, [eos])
        return made

    text = TokenText(tokenizer).stream
    tight = engine(5, 20)
    together = run(tight, requests, text=text)
    assert tight.snapshot().num_preemptions > 0
    for i, request in enumerate(requests):
        alone = run(engine(0, 100), [request], text=text)[request.request_id]
        assert together[request.request_id].token_ids == alone.token_ids
        assert re.fullmatch(f"[a-{'mz'[i % 2]}]{{{20 + i}}}[!?]", alone.text)


class Finishes(RuleMatcher):
    """So many times id 5, then EOS; once EOS was consumed nobody may ask for more."""

    def __init__(self, length: int) -> None:
        super().__init__(lambda output: {5} if len(output) < length else {EOS}, 32)

    def allowed(self) -> Tensor:
        assert EOS not in self.output, "a finished matcher was asked for a mask"
        return super().allowed()


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("name", ["masked", "lookup", "ends"])
def test_a_finished_matcher_is_not_asked_again(name, length):
    """C34: drafts run on behind the EOS that ends the answer in the middle of a block."""
    target = PrefixTarget()
    drafter = {
        "masked": PrefixDrafter(target, 8),
        "lookup": NGramDrafter(4, max_match=2, min_match=1),
        "ends": ConstantDrafter(EOS, 4),
    }[name]
    engine = make_engine(target, drafter)
    engine.add(Request("r", (9, 5, 5, EOS, EOS, EOS, 7), SamplingParams(temperature=0)))
    engine._states["r"].matcher = Finishes(length)
    answer = Answer()
    while engine.has_work:
        for output in engine.step():
            collect(answer, output)
    assert answer.token_ids == [5] * length + [EOS]
    assert answer.last.finish_reason is FinishReason.STOP
