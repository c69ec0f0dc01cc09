"""The accept rules: against a one-by-one reference, in their numerics, and in their law."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emberline.batch import DrawKeys, Draws, Purpose, Verdict
from emberline.layout import Scored, TokenLayout, Tokens
from emberline.sampling.keys import KeyedDraws, draw
from emberline.sampling.rejection import accept

from support.statistics import assert_fits

VOCAB = 5
INF = torch.inf


@dataclass(frozen=True)
class Row:
    """One request of a step."""

    rule: str  # "greedy", "coupled" or "rejection"
    window: int = 1
    before: int = 0  # scored entries before the window
    unscored: int = 0  # tokens before those
    seed: int = 0
    first_position: int = 10


@dataclass(frozen=True)
class World:
    """Everything `accept` reads, for rows laid out in order."""

    rows: list[Row]
    ids: Tensor  # [T] int64
    logits: Tensor  # [Q, V]
    draft_logits: Tensor | None  # [B, K, V]

    def judge(self, draws: Draws) -> Verdict:
        def column(values: list[Any]) -> Tensor:
            return torch.tensor(values)

        rows = self.rows
        scored = [row.before + max(row.window, 0) for row in rows]
        query = [row.unscored + n for row, n in zip(rows, scored, strict=True)]
        layout = TokenLayout.build(
            column(query),
            column([row.window for row in rows]),
            scored_lens=column(scored),
            num_tokens=sum(query),
            num_scored=sum(scored),
        ).check()
        return accept(
            layout,
            Tokens(self.ids),
            Scored(self.logits),
            self.draft_logits,
            greedy=column([row.rule == "greedy" for row in rows]),
            coupled=column([row.rule == "coupled" for row in rows]),
            seeds=column([row.seed for row in rows]),
            first_positions=column([row.first_position for row in rows]),
            draws=draws,
        )

    def alone(self, index: int) -> World:
        """The world of one request."""
        token = sum(row.unscored + row.before + row.window for row in self.rows[:index])
        scored = sum(row.before + row.window for row in self.rows[:index])
        row = self.rows[index]
        num_scored = row.before + row.window
        return World(
            [row],
            self.ids[token : token + row.unscored + num_scored],
            self.logits[scored : scored + num_scored],
            None if self.draft_logits is None else self.draft_logits[index : index + 1],
        )


def runs(verdict: Verdict) -> list[list[tuple[int, int]]]:
    """(id, scored index) of each request's emitted run."""
    pairs = list(zip(verdict.token_ids.tolist(), verdict.scored_index.tolist(), strict=True))
    bounds = verdict.emitted_start_loc.tolist()
    return [pairs[lo:hi] for lo, hi in itertools.pairwise(bounds)]


def reference(world: World, draws: Draws) -> list[tuple[int, int]]:
    """One request, one token at a time."""
    (row,) = world.rows

    def key(entry: int, purpose: Purpose) -> DrawKeys:
        values = (row.seed, row.first_position + entry, int(purpose))
        return DrawKeys(*(torch.tensor([value]) for value in values))

    def sample(logits: Tensor, entry: int, purpose: Purpose) -> int:
        return int(draws.categorical(logits[None], key(entry, purpose)))

    out: list[tuple[int, int]] = []
    for entry in range(row.window):
        index = row.before + entry
        logits = world.logits[index]
        draft = None
        if entry + 1 < row.window:
            draft = int(world.ids[row.unscored + index + 1])
        if row.rule == "rejection":
            p = logits.softmax(-1)
            if draft is None:
                token = sample(logits, entry, Purpose.BONUS)
            else:
                q = torch.zeros(VOCAB, dtype=p.dtype)
                q[draft] = 1
                if world.draft_logits is not None:
                    q = world.draft_logits[0, entry].softmax(-1)
                odds = (p[draft] / q[draft]).clamp(max=1)[None]
                stands = bool(draws.coin(odds, key(entry, Purpose.ACCEPT)))
                left = (p - q).clamp(min=0)
                token = draft
                if not stands:
                    token = int(draws.proportional(left[None], key(entry, Purpose.RECOVER)))
                    return [*out, (token, index)]
        else:
            token = int(logits.argmax())
            if row.rule == "coupled":
                token = sample(logits, entry, Purpose.TARGET)
        out.append((token, index))
        if token != draft:
            break
    return out


def make_world(
    rows: list[Row], seed: int, *, has_q: bool, dtype: torch.dtype = torch.float64, width: int = 4
) -> World:
    """Random logits; drafts that are often right, so that runs of every length occur."""
    generator = torch.Generator().manual_seed(seed)
    num_scored = sum(row.before + row.window for row in rows)
    num_tokens = num_scored + sum(row.unscored for row in rows)
    logits = torch.randn(num_scored, VOCAB, generator=generator, dtype=dtype) * 1.5
    ids = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    token = scored = 0
    for row in rows:
        token += row.unscored
        for entry in range(row.before + row.window - 1):
            if torch.rand((), generator=generator) < 0.6:
                ids[token + entry + 1] = logits[scored + entry].argmax()
        token, scored = token + row.before + row.window, scored + row.before + row.window
    q = torch.randn(len(rows), width, VOCAB, generator=generator, dtype=dtype) if has_q else None
    return World(rows, ids, logits, q)


ROWS = st.builds(
    Row,
    rule=st.sampled_from(["greedy", "coupled", "rejection"]),
    window=st.integers(0, 5),
    before=st.integers(0, 2),
    unscored=st.integers(0, 2),
    seed=st.integers(-(2**63), 2**63 - 1),
    first_position=st.integers(1, 9999),
).filter(lambda row: row.window + row.before + row.unscored > 0)
BATCHES = st.lists(ROWS, min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(BATCHES, st.integers(0, 9999), st.booleans())
def test_a_batch_is_judged_like_its_requests_one_token_at_a_time(
    rows: list[Row], seed: int, has_q: bool
) -> None:
    world, draws = make_world(rows, seed, has_q=has_q), KeyedDraws()
    verdict = world.judge(draws)
    first = 0
    for index, run in enumerate(runs(verdict)):
        expected = reference(world.alone(index), draws)
        assert run == [(token, first + entry) for token, entry in expected]
        assert verdict.num_accepted[index] == max(len(run) - 1, 0)
        first += rows[index].before + rows[index].window


@settings(max_examples=150, deadline=None)
@given(BATCHES, st.integers(0, 9999), st.booleans())
def test_a_verdict_does_not_depend_on_the_batch(rows: list[Row], seed: int, has_q: bool) -> None:
    world, draws = make_world(rows, seed, has_q=has_q, dtype=torch.float32), KeyedDraws()
    first = 0
    for index, run in enumerate(runs(world.judge(draws))):
        (alone,) = runs(world.alone(index).judge(draws))
        assert run == [(token, first + entry) for token, entry in alone]
        first += rows[index].before + rows[index].window


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 99)), min_size=1, max_size=4))
def test_a_coupled_request_emits_the_same_with_and_without_drafts(
    lens: list[tuple[int, int]],
) -> None:
    rows = [Row("coupled", window, seed=seed) for window, seed in lens]
    world, draws = make_world(rows, 7, has_q=False), KeyedDraws()
    first = 0
    for row, run in zip(rows, runs(world.judge(draws)), strict=True):
        for token, index in run:
            single = replace(row, window=1, first_position=row.first_position + index - first)
            plain = World([single], world.ids[:1], world.logits[index : index + 1], None)
            assert plain.judge(draws).token_ids.tolist() == [token]
        first += row.window


# Scripted and absent randomness.


class NoDraws:
    def categorical(self, logits: Tensor, keys: DrawKeys) -> Tensor:
        raise AssertionError("noise was asked for")

    def proportional(self, weights: Tensor, keys: DrawKeys) -> Tensor:
        raise AssertionError("noise was asked for")

    def coin(self, probs: Tensor, keys: DrawKeys) -> Tensor:
        raise AssertionError("noise was asked for")


class Recorder:
    """Coins fall as told; categories take the best id. Remembers what was asked."""

    def __init__(self, heads: bool) -> None:
        self.heads = heads
        self.laws: list[Tensor] = []
        self.odds: list[float] = []
        self.keys: list[tuple[int, int, int]] = []

    def _note(self, keys: DrawKeys) -> None:
        columns = (keys.seeds.tolist(), keys.positions.tolist(), keys.purposes.tolist())
        self.keys += zip(*columns, strict=True)

    def categorical(self, logits: Tensor, keys: DrawKeys) -> Tensor:
        self._note(keys)
        self.laws += list(logits.softmax(-1))
        return logits.argmax(-1)

    def proportional(self, weights: Tensor, keys: DrawKeys) -> Tensor:
        return self.categorical(weights.log(), keys)

    def coin(self, probs: Tensor, keys: DrawKeys) -> Tensor:
        self._note(keys)
        self.odds += probs.tolist()
        return torch.full_like(probs, self.heads, dtype=torch.bool)


def one_draft(
    p: list[float], q: list[float] | None, draft: int, recorder: Draws, rule: str = "rejection"
) -> Verdict:
    """A request with one draft; p and q are probabilities."""
    target = torch.tensor([p, p]).log()
    draft_logits = None if q is None else torch.tensor([[q]]).log()
    world = World([Row(rule, 2, seed=3)], torch.tensor([0, draft]), target, draft_logits)
    return world.judge(recorder)


def test_greedy_requests_ask_for_no_noise_and_take_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0], [0.0, 0.0, 1.0]])
    world = World([Row("greedy", 3)], torch.tensor([0, 1, 0]), logits, None)
    assert runs(world.judge(NoDraws())) == [[(1, 0), (0, 1), (2, 2)]]
    missed = World([Row("greedy", 3)], torch.tensor([0, 2, 0]), logits, None)
    assert runs(missed.judge(NoDraws())) == [[(1, 0)]]


@pytest.mark.parametrize("num_sampled", [0, 7])
def test_greedy_ties_stay_put_beside_sampled_requests(num_sampled: int) -> None:
    for seed in range(20):
        rows = [Row("rejection", seed=seed * 10 + n) for n in range(num_sampled)]
        logits = torch.zeros(num_sampled + 1, VOCAB)
        world = World([*rows, Row("greedy")], torch.zeros(num_sampled + 1).long(), logits, None)
        assert world.judge(KeyedDraws()).token_ids[-1] == 0


def test_a_step_that_samples_nothing_is_empty() -> None:
    world = make_world([Row("rejection", 0, before=2), Row("greedy", 0, unscored=3)], 0, has_q=True)
    verdict = world.judge(NoDraws())
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.emitted_start_loc.tolist() == [0, 0, 0]
    assert len(verdict.token_ids) == len(verdict.scored_index) == 0


def test_a_draft_is_accepted_with_the_ratio_and_recovered_from_the_rest() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.6, 0.2]
    tails = Recorder(heads=False)
    verdict = one_draft(p, q, 1, tails)
    assert tails.odds == pytest.approx([0.5])
    assert tails.laws[0].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert tails.keys == [(3, 10, Purpose.ACCEPT), (3, 10, Purpose.RECOVER)]
    assert runs(verdict) == [[(0, 0)]]
    heads = Recorder(heads=True)
    verdict = one_draft(p, q, 1, heads)
    assert heads.laws[0].tolist() == pytest.approx(p)
    assert heads.keys == [(3, 10, Purpose.ACCEPT), (3, 11, Purpose.BONUS)]
    assert runs(verdict) == [[(1, 0), (0, 1)]]


def test_a_point_mass_is_accepted_with_p_and_recovered_without_itself() -> None:
    recorder = Recorder(heads=False)
    one_draft([0.5, 0.3, 0.2], None, 1, recorder)
    assert recorder.odds == pytest.approx([0.3])
    assert recorder.laws[0].tolist() == pytest.approx([5 / 7, 0.0, 2 / 7])


@pytest.mark.parametrize(
    ("p", "q", "odds"),
    [
        ([0.4, 0.6, 0.0], [0.5, 0.5, 0.0], 1.0),  # p(x) > q(x)
        ([1.0, 0.0, 0.0], [0.5, 0.5, 0.0], 0.0),  # a masked draft
        ([0.4, 0.6, 0.0], [1.0, 0.0, 0.0], 1.0),  # q(x) underflowed
        ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], 0.0),  # both did
    ],
)
def test_odds_are_probabilities_at_every_edge(p: list[float], q: list[float], odds: float) -> None:
    recorder = Recorder(heads=False)
    one_draft(p, q, 1, recorder)
    assert recorder.odds == [odds]
    assert recorder.laws[0].isfinite().all()


def test_a_rejection_between_equals_recovers_from_p() -> None:
    recorder = Recorder(heads=False)
    one_draft([0.25, 0.75], [0.25, 0.75], 0, recorder)
    assert recorder.laws[0].tolist() == pytest.approx([0.25, 0.75])


def test_equal_distributions_never_reject() -> None:
    rows = [Row("rejection", 4, seed=seed) for seed in range(500)]
    world = make_world(rows, 0, has_q=False, dtype=torch.float32)
    q = world.logits.view(500, 4, VOCAB)[:, :3]
    ids = world.ids.view(500, 4).clone()
    ids[:, 1:] = torch.randint(0, VOCAB, (500, 3), generator=torch.Generator().manual_seed(1))
    verdict = World(rows, ids.flatten(), world.logits, q).judge(KeyedDraws())
    assert (verdict.num_accepted == 3).all()


def test_neither_p_nor_q_is_written_to() -> None:
    world = make_world([Row("rejection", 3, seed=1), Row("coupled", 2)], 5, has_q=True)
    assert world.draft_logits is not None
    p, q = world.logits.clone(), world.draft_logits.clone()
    world.judge(Recorder(heads=False))
    assert torch.equal(world.logits, p)
    assert torch.equal(world.draft_logits, q)


# The law with real noise: three tokens of a Markov chain, jointly, over several steps.

NUM_REQUESTS = 120_000
CHAIN = 4
TABLE = torch.tensor(
    [[0.1, 0.9, 0.0, -1.0], [1.2, -0.3, 0.4, 0.0], [0.0, 0.0, 2.0, -0.5], [0.7, 0.6, 0.5, -2.0]]
)


def chain_law() -> Tensor:
    step = TABLE.double().softmax(-1)
    return (step[0][:, None, None] * step[:, :, None] * step[None]).flatten()


def propose(anchors: Tensor, keys: DrawKeys, table: Tensor | None, width: int) -> Any:
    """[B, K] drafts and [B, K, V] what they were drawn from (None: fixed guesses)."""
    if table is None:
        return (anchors[:, None] + 1 + torch.arange(width)) % CHAIN, None
    previous, ids, logits = anchors, [], []
    for index in range(width):
        here = DrawKeys(keys.seeds, keys.positions + index, keys.purposes)
        previous, drawn = draw(
            table[previous], torch.full((len(anchors),), 0.7), here, KeyedDraws()
        )
        ids.append(previous)
        logits.append(drawn)
    return torch.stack(ids, 1), torch.stack(logits, 1)


def speculate(seeds: Tensor, coupled: bool, table: Tensor | None, width: int) -> Tensor:
    """[B, 3] the first tokens after anchor 0, from as many steps as it takes."""
    num_reqs, wanted = len(seeds), 3
    out = torch.zeros(num_reqs, wanted + width + 1, dtype=torch.int64)
    done, anchors = torch.zeros(num_reqs, dtype=torch.int64), torch.zeros_like(seeds)
    lens = torch.full((num_reqs,), width + 1)
    layout = TokenLayout.build(
        lens, lens, num_tokens=num_reqs * (width + 1), num_scored=num_reqs * (width + 1)
    )
    purpose = Purpose.TARGET if coupled else Purpose.DRAFT
    for _ in range(wanted):
        keys = DrawKeys(seeds, done + 1, torch.full_like(seeds, int(purpose)))
        drafts, logits = propose(anchors, keys, table, width)
        ids = torch.cat([anchors[:, None], drafts], dim=1).flatten()
        verdict = accept(
            layout,
            Tokens(ids),
            Scored(TABLE[ids]),
            logits,
            greedy=torch.zeros(num_reqs, dtype=torch.bool),
            coupled=torch.full((num_reqs,), coupled),
            seeds=seeds,
            first_positions=done + 1,
            draws=KeyedDraws(),
        )
        counts = verdict.emitted_start_loc.diff()
        req = torch.repeat_interleave(torch.arange(num_reqs), counts)
        place = torch.arange(len(req)) - verdict.emitted_start_loc[req] + done[req]
        unfinished = (done[req] < wanted) & (place < out.shape[1])
        out[req[unfinished], place[unfinished]] = verdict.token_ids[unfinished]
        done, anchors = done + counts, verdict.token_ids[verdict.emitted_start_loc[1:] - 1]
    return out[:, :wanted]


GENERATOR = torch.Generator().manual_seed(11)
DRAFT_TABLE = torch.randn(CHAIN, CHAIN, generator=GENERATOR)
COARSE_TABLE = (DRAFT_TABLE * 2).round().bfloat16()  # two-bit logits: q far from smooth


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    "table", [DRAFT_TABLE, COARSE_TABLE, None], ids=["fine", "coarse", "fixed"]
)
def test_three_tokens_have_the_targets_law(table: Tensor | None, coupled: bool, width: int) -> None:
    seeds = torch.arange(NUM_REQUESTS) * 7919 + width
    tokens = speculate(seeds, coupled, table, width)
    cells = (tokens * torch.tensor([CHAIN * CHAIN, CHAIN, 1])).sum(-1)
    assert_fits(cells.bincount(minlength=CHAIN**3), chain_law())


def test_a_seed_gives_the_same_tokens_whatever_was_drafted() -> None:
    seeds = torch.arange(2000)
    plain = speculate(seeds, True, None, 0)
    for table in (DRAFT_TABLE, None):
        for width in (1, 3):
            assert torch.equal(speculate(seeds, True, table, width), plain)


def test_shared_noise_accepts_more_than_chance() -> None:
    """Coupling works at all: draft and target that agree draw the same token."""
    seeds = torch.arange(2000)
    keys = DrawKeys(seeds, torch.ones_like(seeds), torch.zeros_like(seeds))
    draft = KeyedDraws().categorical(TABLE[0].expand(2000, -1), keys)
    nearly = KeyedDraws().categorical((TABLE[0] + 0.01 * DRAFT_TABLE[0]).expand(2000, -1), keys)
    assert (draft == nearly).float().mean() > 0.98
