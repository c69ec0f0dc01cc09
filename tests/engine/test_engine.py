"""The engine's step and scheduler over a target whose KV is token ids: every law but speed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from emberline.batch import KVSpec
from emberline.cache.kv_pool import KVPool
from emberline.drafters.ngram import NGramDrafter
from emberline.types import (
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
)
from emberline.verify.planner import Threshold, VerifyAll

from support.engines import EOS, Answer, Letters, ask, make_engine, run
from support.paged import ConstantDrafter, PrefixDrafter, PrefixTarget

PROMPT = [5, 9, 3, 7, 2]


def greedy(count: int = 40, **kwargs: object) -> SamplingParams:
    options: dict[str, object] = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
    return SamplingParams(**{**options, **kwargs})  # type: ignore[arg-type]


def drafters(target: PrefixTarget) -> dict[str, object]:
    return {
        "perfect": PrefixDrafter(target, 7),
        "mixed": PrefixDrafter(target, 7, wrong_every=3),
        "noisy": PrefixDrafter(target, 5, noise=3.0, doubt_every=4),
        "constant": ConstantDrafter(4, 4),
        "ngram": NGramDrafter(4),
        "one": PrefixDrafter(target, 1),
    }


@pytest.mark.parametrize("name", ["perfect", "mixed", "noisy", "constant", "ngram", "one"])
@pytest.mark.parametrize("layout", ["static", "compact"])
@pytest.mark.parametrize("planner", [VerifyAll(), Threshold(0.5)])
def test_greedy_text_and_logprobs_ignore_speculation(name, layout, planner):
    target = PrefixTarget()
    expected = target.greedy(PROMPT, 40)
    engine = make_engine(target, drafters(target)[name], layout=layout, planner=planner)
    answer = ask(engine, PROMPT, greedy(logprobs=3))
    assert answer.token_ids == expected
    prefix = list(PROMPT)
    for record in answer.logprobs:
        logprobs = target.logits_after(prefix).log_softmax(-1)
        assert record.logprob == pytest.approx(float(logprobs[record.token_id]), abs=1e-5)
        assert record.rank == 1
        assert record.top_ids == tuple(logprobs.topk(3).indices.tolist())
        assert record.top_logprobs[0] == record.logprob  # the very same float
        prefix.append(record.token_id)


def test_a_perfect_drafter_is_accepted_whole():
    target = PrefixTarget()
    answer = ask(make_engine(target, PrefixDrafter(target, 7)), PROMPT, greedy(41))
    stats = answer.last.stats
    # 1 token from the prompt, then blocks of 8.
    assert (stats.num_steps, stats.num_emitted, stats.acceptance_length) == (5, 40, 8.0)
    assert stats.accepted_per_pos == (5,) * 7
    assert stats.num_accepted == stats.num_verified == 35


def test_stats_follow_the_real_widths():
    target = PrefixTarget()
    drafter = PrefixDrafter(target, 6, doubt_every=4)
    answer = ask(make_engine(target, drafter, planner=Threshold(0.5)), PROMPT, greedy(60))
    stats = answer.last.stats
    assert 0 < stats.num_verified < stats.num_drafted
    assert stats.num_accepted == sum(stats.accepted_per_pos)
    assert stats.num_verified == sum(stats.verified_per_pos)
    assert stats.num_emitted == stats.num_accepted + stats.num_steps


def test_trimming_runs_only_the_admitted_tokens():
    target = PrefixTarget()
    drafter = PrefixDrafter(target, 6, doubt_every=4)
    answer = ask(make_engine(target, drafter, planner=Threshold(0.5)), PROMPT, greedy(60))
    stats = answer.last.stats
    assert sum(target.num_tokens_run) == len(PROMPT) + stats.num_steps + stats.num_verified


@pytest.mark.parametrize("layout", ["static", "compact"])
def test_rows_follow_the_layout(layout):
    target = PrefixTarget()
    ask(make_engine(target, PrefixDrafter(target, 3), layout=layout), PROMPT, greedy(9))
    expected = {"static": [8, 4, 4], "compact": [5, 4, 4]}
    assert target.num_rows_run == expected[layout]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16, 512])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_any_chunking_gives_the_same_answer(chunk, length):
    target = PrefixTarget()
    prompt = [(7 * i) % 31 for i in range(length)]
    engine = make_engine(target, PrefixDrafter(target, 4, wrong_every=5), prefill_chunk=chunk)
    answer = ask(engine, prompt, greedy(12, prompt_logprobs=2))
    assert answer.token_ids == target.greedy(prompt, 12)
    scores = answer.outputs[0].prompt_logprobs
    assert scores is not None
    assert len(scores) == length
    assert scores[0] is None
    for p, record in enumerate(scores[1:], 1):
        logprobs = target.logits_after(prompt[:p]).log_softmax(-1)
        assert record.token_id == prompt[p]
        assert record.logprob == pytest.approx(float(logprobs[prompt[p]]), abs=1e-5)
        assert record.top_ids == tuple(logprobs.topk(2).indices.tolist())
    assert all(o.prompt_logprobs is None for o in answer.outputs[1:])


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 7, 8, 9, 16])
def test_prompt_logprobs_from_any_start(start):
    target = PrefixTarget()
    prompt = [(5 * i) % 31 for i in range(17)]
    engine = make_engine(target, prefill_chunk=4)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start)
    answer = ask(engine, prompt, params)
    scores = answer.last.prompt_logprobs
    assert answer.token_ids == []
    assert answer.last.finish_reason is FinishReason.LENGTH
    assert len(scores) == len(prompt)
    for p, record in enumerate(scores):
        if p < max(start, 1):
            assert record is None
        else:
            expected = target.logits_after(prompt[:p]).log_softmax(-1)[prompt[p]]
            assert record.logprob == pytest.approx(float(expected), abs=1e-5)


def many(count: int, **kwargs: object) -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple((3 * i + 11 * j) % 31 for j in range(1 + 5 * i % 23)),
            SamplingParams(
                **{  # type: ignore[arg-type]
                    "temperature": (0.0, 0.7, 1.3)[i % 3],
                    "max_tokens": 5 + 7 * i % 40,
                    "seed": i,
                    "logprobs": (None, 0, 4)[i % 3],
                    "ignore_eos": True,
                    **kwargs,
                }
            ),
        )
        for i in range(count)
    ]


def ids_of(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}


@pytest.mark.parametrize("layout", ["static", "compact"])
def test_seeded_coupled_text_ignores_speculation_and_batch(layout):
    target = PrefixTarget(scale=1.0)
    alone = {r.request_id: run(make_engine(target), [r])[r.request_id].token_ids for r in many(12)}
    for drafter in (None, PrefixDrafter(target, 5, noise=1.0, doubt_every=3), NGramDrafter(3)):
        engine = make_engine(target, drafter, planner=Threshold(0.4), layout=layout)
        assert ids_of(run(engine, many(12))) == alone


def test_seeded_rejection_text_ignores_the_batch():
    target = PrefixTarget(scale=1.0)

    def engine():
        return make_engine(target, PrefixDrafter(target, 5, noise=1.0))

    requests = many(10, accept="rejection")
    alone = {r.request_id: run(engine(), [r])[r.request_id].token_ids for r in requests}
    assert ids_of(run(engine(), requests)) == alone


def test_out_of_pages_preempts_and_nothing_is_lost_or_repeated():
    target = PrefixTarget(scale=1.0)
    requests = many(8, max_tokens=50, prompt_logprobs=1)
    roomy = make_engine(target, PrefixDrafter(target, 5, noise=1.0))
    tight = make_engine(target, PrefixDrafter(target, 5, noise=1.0), num_pages=30, prefill_chunk=4)
    expected, got = run(roomy, requests), run(tight, requests)
    assert tight.snapshot().num_preemptions > 0
    assert tight.snapshot().prompt_tokens == roomy.snapshot().prompt_tokens
    assert ids_of(got) == ids_of(expected)
    for key, answer in got.items():
        assert [o.prompt_logprobs for o in answer.outputs if o.prompt_logprobs] == [
            o.prompt_logprobs for o in expected[key].outputs if o.prompt_logprobs
        ]
        for a, b in zip(answer.logprobs, expected[key].logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_abort_frees_everything_and_harms_nobody(when):
    target = PrefixTarget()
    engine = make_engine(target, PrefixDrafter(target, 4, wrong_every=4), prefill_chunk=4)
    requests = many(6, max_tokens=40)
    expected = ids_of(run(make_engine(target), requests))

    def between(number: int) -> None:
        if number == when:
            engine.abort("r2")
            engine.abort("r5")
            engine.abort("nobody")

    got = run(engine, requests, between=between)
    for key in ("r2", "r5"):
        assert got[key].last.finish_reason is FinishReason.ABORT
        assert got[key].token_ids == expected[key][: len(got[key].token_ids)]
    for key in ("r0", "r1", "r3", "r4"):
        assert got[key].token_ids == expected[key]


def test_abort_while_waiting():
    target = PrefixTarget()
    engine = make_engine(target, max_num_reqs=1)
    requests = many(3)
    for request in requests:
        engine.add(request)
    engine.step()
    engine.abort("r1")
    outputs = engine.step()
    assert [o.finish_reason for o in outputs if o.request_id == "r1"] == [FinishReason.ABORT]
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(("offset", "drafts"), list(product(range(1, 11), (1, 4, 8))))
def test_eos_at_every_offset_of_a_block(offset, drafts):
    target = PrefixTarget()
    path = target.greedy(PROMPT, 30)
    eos = path[offset]
    end = path.index(eos) + 1
    engine = make_engine(target, PrefixDrafter(target, drafts), eos_ids=[eos])
    answer = ask(engine, PROMPT, SamplingParams(temperature=0, max_tokens=30, logprobs=2))
    assert answer.token_ids == path[:end]
    assert len(answer.logprobs) == end
    assert (answer.last.finish_reason, answer.last.stop_reason) == (FinishReason.STOP, None)
    stats = answer.last.stats
    assert stats.num_emitted == end - 1
    # Drafts behind the stop were verified, but nobody accepted them.
    assert stats.num_accepted == sum(stats.accepted_per_pos) <= stats.num_emitted


@pytest.mark.parametrize("cap", range(1, 21))
def test_max_tokens_at_every_offset_of_a_block(cap):
    target = PrefixTarget()
    answer = ask(make_engine(target, PrefixDrafter(target, 8)), PROMPT, greedy(cap, logprobs=1))
    assert answer.token_ids == target.greedy(PROMPT, cap)
    assert len(answer.logprobs) == answer.last.num_output_tokens == cap
    assert answer.last.finish_reason is FinishReason.LENGTH
    # A window never runs past the cap: nothing is verified that could not be emitted.
    assert max(target.num_tokens_run[1:], default=0) < max(cap, 2)


@pytest.mark.parametrize(("stop_at", "cap"), list(product(range(1, 12, 2), range(1, 12, 3))))
def test_stop_id_against_cap(stop_at, cap):
    target = PrefixTarget()
    path = target.greedy(PROMPT, 30)
    stop = path[stop_at]
    end = min(path.index(stop) + 1, cap)
    params = greedy(cap, stop_token_ids=[stop])
    answer = ask(make_engine(target, PrefixDrafter(target, 8)), PROMPT, params)
    assert answer.token_ids == path[:end]
    stopped = path.index(stop) + 1 <= cap
    assert answer.last.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert answer.last.stop_reason == (stop if stopped else None)


@pytest.mark.parametrize("min_tokens", range(10))
def test_min_tokens_masks_eos_at_exactly_the_right_positions(min_tokens):
    """EOS is the most likely token everywhere: it comes as token min_tokens + 1, never before."""

    class Eager(PrefixTarget):
        def logits_after(self, prefix):
            logits = super().logits_after(prefix).clone()
            logits[EOS] = 50.0
            return logits

    target = Eager()
    for drafter in (None, PrefixDrafter(target, 4), ConstantDrafter(EOS, 6)):
        params = SamplingParams(temperature=0, max_tokens=20, min_tokens=min_tokens)
        answer = ask(make_engine(target, drafter), PROMPT, params)
        assert len(answer.token_ids) == min_tokens + 1
        assert answer.token_ids.index(EOS) == min_tokens


@pytest.mark.parametrize("prompt_len", [120, 121, 125, 126, 127])
def test_context_limit(prompt_len):
    target = PrefixTarget(max_model_len=128)
    prompt = [(3 * i) % 31 for i in range(prompt_len)]
    for drafter in (None, PrefixDrafter(target, 8), NGramDrafter(8)):
        params = SamplingParams(temperature=0, ignore_eos=True)
        answer = ask(make_engine(target, drafter), prompt, params)
        assert answer.token_ids == target.greedy(prompt, 128 - prompt_len)
        assert answer.last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt_len", [128, 129])
def test_prompts_without_room_are_refused(prompt_len):
    engine = make_engine(PrefixTarget(max_model_len=128))
    with pytest.raises(InvalidRequest, match="context length of 128") as caught:
        engine.add(Request("r", (3,) * prompt_len))
    assert caught.value.param == "prompt"
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 200}, "max_tokens"),
        ({"logit_bias": {99: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [32]}, "stop_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprobs": 33}, "logprobs"),
        ({"stop": ["x"]}, "stop"),
        ({"prompt_logprobs": 1, "prompt_logprobs_start": 5}, "prompt_logprobs_start"),
    ],
)
def test_what_can_never_run_is_refused_with_its_field(options, param):
    engine = make_engine(PrefixTarget())
    with pytest.raises(InvalidRequest) as caught:
        engine.add(Request("r", tuple(PROMPT), SamplingParams(**options)))
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", [(), (32,), (-1,), (2**31,)])
def test_bad_prompts_are_refused(prompt):
    with pytest.raises(InvalidRequest) as caught:
        make_engine(PrefixTarget()).add(Request("r", prompt))
    assert caught.value.param == "prompt"


def test_the_queue_is_bounded():
    engine = make_engine(PrefixTarget(), max_queue=3, max_num_reqs=1)
    for i in range(3):
        engine.add(Request(f"r{i}", tuple(PROMPT), greedy(2)))
    with pytest.raises(QueueFull, match="queue of 3 requests is full"):
        engine.add(Request("r3", tuple(PROMPT), greedy(2)))
    while engine.has_work:
        engine.step()


def test_a_long_prompt_does_not_stall_running_answers():
    target = PrefixTarget(max_model_len=512, num_slots=8192)
    engine = make_engine(target, prefill_chunk=16, max_num_tokens=20, num_pages=512)
    engine.add(Request("short", tuple(PROMPT), greedy(30)))
    engine.step()
    engine.add(Request("long", tuple(i % 31 for i in range(400)), greedy(3)))
    for _ in range(10):
        assert "short" in {o.request_id for o in engine.step()}
    assert max(target.num_tokens_run) <= 20


def test_no_speculation_for_one_request_leaves_its_neighbours_drafting():
    target = PrefixTarget()
    drafter = PrefixDrafter(target, 4)
    engine = make_engine(target, drafter)
    answers = run(
        engine,
        [
            Request("plain", tuple(PROMPT), greedy(20, speculate=False)),
            Request("drafted", tuple(PROMPT), greedy(20)),
        ],
    )
    assert answers["plain"].last.stats.num_drafted == 0
    assert answers["plain"].last.stats.acceptance_length == 1.0
    assert answers["drafted"].last.stats.acceptance_length > 4
    assert answers["plain"].token_ids == answers["drafted"].token_ids


def test_raw_logprobs_ignore_every_sampling_option():
    target = PrefixTarget()
    forced = target.greedy(PROMPT, 1)[0]
    seen = set()
    for options in (
        {},
        {"logit_bias": {forced: 5.0}},
        {"top_k": 1},
        {"top_p": 0.01},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.01, "logit_bias": {forced: 90.0}},
    ):
        params = greedy(6, logprobs=4, **options)
        record = ask(make_engine(target, PrefixDrafter(target, 4)), PROMPT, params).logprobs[0]
        seen.add((record.token_id, record.logprob, record.top_ids, record.top_logprobs))
    assert len(seen) == 1


@pytest.mark.parametrize("drafts", [0, 3])
def test_processed_logprobs_are_those_of_the_sampled_law(drafts):
    target = PrefixTarget(scale=1.0)
    drafter = PrefixDrafter(target, drafts, noise=0.5) if drafts else None
    params = SamplingParams(
        temperature=0.5,
        top_k=4,
        max_tokens=12,
        seed=3,
        logprobs=6,
        logprobs_mode="processed",
        ignore_eos=True,
    )
    answer = ask(make_engine(target, drafter), PROMPT, params)
    prefix = list(PROMPT)
    for record in answer.logprobs:
        logits = target.logits_after(prefix) / 0.5
        kept = logits.topk(4)
        expected = torch.full_like(logits, -torch.inf)
        expected[kept.indices] = kept.values.log_softmax(-1)
        assert record.logprob == pytest.approx(float(expected[record.token_id]), abs=1e-5)
        assert record.top_logprobs[4:] == (-torch.inf,) * 2
        prefix.append(record.token_id)


def test_chosen_ids_in_a_mixed_batch():
    target = PrefixTarget()
    wanted = {"a": (3, 8), "b": (), "c": (1, 2, 3, 4), "d": (31,)}
    requests = [
        Request(key, (5, i + 1), greedy(10, logprobs=1 if ids else None, logprob_token_ids=ids))
        for i, (key, ids) in enumerate(wanted.items())
    ]
    answers = run(make_engine(target, PrefixDrafter(target, 3, wrong_every=4)), requests)
    for request in requests:
        answer, ids = answers[request.request_id], wanted[request.request_id]
        prefix = list(request.prompt_token_ids)
        assert len(answer.logprobs) == (10 if ids else 0)
        for record in answer.logprobs:
            logprobs = target.logits_after(prefix).log_softmax(-1)
            assert record.chosen_logprobs == pytest.approx(
                [float(logprobs[i]) for i in ids], abs=1e-5
            )
            prefix.append(record.token_id)


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.4},
        {"logit_bias": {4: 3.0, 9: -100.0}},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 13},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 1.0},
        {"temperature": 0.8, "seed": 5, "top_p": 0.7, "min_p": 0.05, "top_k": 9},
    ],
)
def test_options_mean_the_same_with_and_without_drafts(options):
    target = PrefixTarget(vocab_size=12, scale=1.0)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **options})
    plain = ask(make_engine(target), PROMPT, params)
    for drafter in drafters(target).values():
        answer = ask(make_engine(target, drafter), PROMPT, params)
        assert answer.token_ids == plain.token_ids


def test_a_banned_token_never_appears():
    target = PrefixTarget(vocab_size=12, scale=1.0)
    path = target.greedy(PROMPT, 200)
    banned = max(set(path), key=path.count)
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature,
            seed=2,
            max_tokens=100,
            ignore_eos=True,
            logit_bias={banned: -100.0},
        )
        answer = ask(make_engine(target, PrefixDrafter(target, 8)), PROMPT, params)
        assert len(answer.token_ids) == 100
        assert banned not in answer.token_ids


def test_the_sign_of_a_penalty_matters():
    target = PrefixTarget(vocab_size=12, scale=1.0)
    for name in ("frequency_penalty", "presence_penalty"):
        texts = [
            ask(
                make_engine(target, PrefixDrafter(target, 4)), PROMPT, greedy(40, **{name: value})
            ).token_ids
            for value in (-2.0, 2.0)
        ]
        assert len(set(texts[0])) < len(set(texts[1]))


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("end", range(1, 20))
def test_a_stop_string_over_two_tokens_cuts_everything_at_one_place(end, drafts):
    target = PrefixTarget(vocab_size=20)
    path = target.greedy(PROMPT, 40)
    letters = "".join(chr(97 + i) for i in path)
    stop = letters[end - 1 : end + 1]
    at = letters.index(stop)
    drafter = PrefixDrafter(target, drafts) if drafts else None
    params = greedy(40, stop=[stop], logprobs=1)
    answer = ask(make_engine(target, drafter), PROMPT, params, text=Letters)
    assert answer.text == letters[:at]
    assert answer.token_ids == path[: at + 2]
    assert len(answer.logprobs) == answer.last.num_output_tokens == at + 2
    assert (answer.last.finish_reason, answer.last.stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("min_tokens", [1, 5, 9, 16])
def test_stop_strings_wait_for_min_tokens(min_tokens):
    target = PrefixTarget(vocab_size=20)
    letters = "".join(chr(97 + i) for i in target.greedy(PROMPT, 60))
    stop = letters[2]
    params = greedy(60, stop=[stop], min_tokens=min_tokens)
    answer = ask(make_engine(target, PrefixDrafter(target, 8)), PROMPT, params, text=Letters)
    expected = letters.index(stop, min_tokens - 1) + 1
    assert len(answer.token_ids) == expected >= min_tokens


def test_nan_logits_fail_their_request_and_no_other():
    target = PrefixTarget()
    path = target.greedy(PROMPT, 10)
    for logprobs in (None, 3):
        target.overrides[(*PROMPT, *path[:4])] = torch.full((32,), torch.nan)
        engine = make_engine(target, PrefixDrafter(target, 4))
        victim = Request("nan", tuple(PROMPT), greedy(10, logprobs=logprobs))
        answers = run(engine, [victim, *many(3)])
        assert answers["nan"].last.finish_reason is FinishReason.ERROR
        assert "NaN" in answers["nan"].last.error
        expected = run(make_engine(PrefixTarget()), many(3))
        assert {k: answers[k].token_ids for k in expected} == ids_of(expected)


def test_a_broken_request_leaves_nothing_behind():
    """NaN in its pages would reach whoever gets them next: a masked slot is only times zero."""
    pool = KVPool.allocate(KVSpec(1, 1, 2), 65, 4, torch.float32, "cpu")

    class Dirty(PrefixTarget):
        def forward(self, batch):
            pool.keys[:, batch.slot_mapping] = torch.nan
            return super().forward(batch)

    target = Dirty()
    target.overrides[tuple(PROMPT)] = torch.full((32,), torch.nan)
    engine = make_engine(target, num_pages=64)
    engine.parts = replace(engine.parts, kv_pools=(pool,))
    answer = ask(engine, PROMPT, greedy(3))
    assert answer.last.finish_reason is FinishReason.ERROR
    assert torch.isfinite(pool.keys).all()


def test_infinite_logits_and_options_that_leave_no_token_are_errors():
    target = PrefixTarget()
    target.overrides[tuple(PROMPT)] = torch.full((32,), torch.inf)
    answer = ask(make_engine(target), PROMPT, greedy(3, logprobs=1))
    assert answer.last.finish_reason is FinishReason.ERROR
    everything = greedy(5, min_tokens=3, stop_token_ids=range(32), logprobs=1)
    answer = ask(make_engine(PrefixTarget()), PROMPT, everything)
    assert answer.last.finish_reason is FinishReason.ERROR
    assert "leave no token" in answer.last.error


def test_nan_after_a_rejected_draft_is_nobodys():
    target = PrefixTarget()
    path = target.greedy(PROMPT, 20)
    wrong = next(i for i in range(32) if i != path[3])
    target.overrides[(*PROMPT, *path[:3], wrong)] = torch.full((32,), torch.nan)
    answer = ask(make_engine(target, ConstantDrafter(wrong, 4)), PROMPT, greedy(20))
    assert answer.token_ids == path


def test_a_draft_from_nan_is_not_verified():
    """A ratio to a q of NaN would accept anything."""
    target = PrefixTarget(scale=1.0)

    class Broken(PrefixDrafter):
        def propose(self, context):
            proposal = super().propose(context)
            if proposal.logits is not None:
                proposal.logits[:, 2:] = torch.nan
                proposal.token_ids[:, 2:] = 7
            return proposal

    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    stats = ask(make_engine(target, Broken(target, 5)), PROMPT, params).last.stats
    assert len(stats.verified_per_pos) == 2
    assert stats.num_accepted == stats.num_verified  # q is p up to there


def test_a_prompt_that_fills_the_pool_can_be_scored():
    target = PrefixTarget()
    engine = make_engine(target, num_pages=8)
    prompt = [(3 * i) % 31 for i in range(32)]
    answers = run(
        engine,
        [
            Request("score", tuple(prompt), SamplingParams(max_tokens=0, prompt_logprobs=0)),
            Request("next", tuple(PROMPT), greedy(3)),
        ],
    )
    assert len(answers["score"].last.prompt_logprobs) == 32
    assert answers["next"].token_ids == target.greedy(PROMPT, 3)


def test_prompts_are_admitted_only_beside_what_others_still_need():
    target = PrefixTarget()
    requests = [
        Request(f"r{i}", tuple((7 * j + i) % 31 for j in range(40)), greedy(2)) for i in range(4)
    ]
    engine = make_engine(target, num_pages=16, prefill_chunk=8)
    answers = run(engine, requests)
    assert all(len(answer.token_ids) == 2 for answer in answers.values())
    assert engine.snapshot().num_preemptions == 0
    assert sum(target.num_tokens_run) == 4 * 41


def test_scored_prompt_rows_are_bounded_over_all_requests():
    target = PrefixTarget(max_model_len=256, num_slots=8192)
    requests = [
        Request(f"r{i}", tuple((j + i) % 31 for j in range(150)), greedy(1, prompt_logprobs=0))
        for i in range(4)
    ]
    answers = run(make_engine(target, num_pages=512), requests)
    assert all(len(a.outputs[0].prompt_logprobs) == 150 for a in answers.values())
    assert max(target.num_scored_run) <= 128 + len(requests)


def test_an_aborted_prompt_reports_no_part_of_its_scores():
    target = PrefixTarget()
    engine = make_engine(target, prefill_chunk=4)
    engine.add(Request("r", tuple(range(2, 22)), SamplingParams(prompt_logprobs=0)))
    engine.step()
    engine.abort("r")
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ABORT
    assert output.prompt_logprobs is None


def test_observed_tokens_are_the_committed_sequence():
    target = PrefixTarget()
    drafter = PrefixDrafter(target, 5, wrong_every=3)
    answer = ask(make_engine(target, drafter, prefill_chunk=2), PROMPT, greedy(20))
    sequence = [*PROMPT, *answer.token_ids]
    # Everything but the last emitted token has KV, and its successor was known when it was written.
    pairs = pairwise(sequence)
    assert drafter.observed == dict(enumerate(pairs))


def test_who_does_not_stream_gets_one_output():
    target = PrefixTarget()
    streamed = ask(make_engine(target, PrefixDrafter(target, 7)), PROMPT, greedy(logprobs=1))
    engine = make_engine(target, PrefixDrafter(target, 7))
    whole = run(engine, [Request("r", tuple(PROMPT), greedy(logprobs=1), stream=False)])["r"]
    assert len(whole.outputs) == 1 < len(streamed.outputs)
    assert (whole.token_ids, whole.logprobs) == (streamed.token_ids, streamed.logprobs)
    assert whole.last.stats == streamed.last.stats


def test_what_was_held_back_comes_with_an_abort():
    engine = make_engine(PrefixTarget())
    engine.add(Request("r", tuple(PROMPT), greedy(logprobs=0), stream=False))
    for _ in range(4):
        assert not engine.step()
    engine.abort("r")
    [output] = engine.step()
    assert output.finish_reason is FinishReason.ABORT
    assert list(output.token_ids) == PrefixTarget().greedy(PROMPT, 4)
    assert len(output.logprobs) == 4
