"""The acceptance kernels against `sampling.rejection.accept`: the same verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from emberline.batch import DrawKeys, Purpose, Verdict
from emberline.layout import Scored, TokenLayout, Tokens
from emberline.ops.triton.verdict import accept
from emberline.sampling import keys as plain_keys
from emberline.sampling import rejection as plain

from support.triton_kernels import DEVICE

DRAFTS = 3


@dataclass(frozen=True)
class World:
    """Windows of a step with drafts drawn from q, and what the kernels need of them."""

    logits: Tensor  # [Q, V]
    layout: TokenLayout
    draft_ids: Tensor  # [B, K]
    draft_logits: Tensor  # [B, K, V]
    normalisers: Tensor  # [B, K, 2]
    temperatures: Tensor  # [B]
    coupled: Tensor  # [B]
    seeds: Tensor
    positions: Tensor

    def ours(self, points: bool = False, coins: bool = True) -> tuple[Verdict, Tensor]:
        return accept(
            Scored(self.logits),
            self.layout.window_start,
            self.layout.window_lens,
            self.draft_ids,
            None if points else self.draft_logits,
            None if points else self.normalisers,
            temperatures=self.temperatures,
            coupled=self.coupled,
            seeds=self.seeds,
            first_positions=self.positions,
            coins=coins,
        )

    def plain(self, points: bool = False) -> Verdict:
        """By the plain op: divided logits, ids in token space."""
        layout = self.layout
        req, offset = layout.req_of_token, layout.offset_of_token
        k = offset - (layout.query_start_loc.diff() - layout.window_lens)[req] - 1
        ids = torch.where(k >= 0, self.draft_ids[req, k.clamp_min(0)], 0)
        scored_req = req[layout.token_of_scored]
        temperature = self.temperatures[scored_req]
        divided = self.logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        return plain.accept(
            layout,
            Tokens(ids),
            Scored(divided),
            None if points else self.draft_logits,
            greedy=self.temperatures == 0,
            coupled=self.coupled,
            seeds=self.seeds,
            first_positions=self.positions,
            draws=plain_keys.KeyedDraws(),
        )


def make_world(vocab: int, lens: list[int], seed: int = 0, apart: float = 0.7) -> World:
    """Windows of `lens` entries behind 0 .. 2 scored entries; every rule among the requests."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    num = len(lens)
    req = torch.arange(num, device=DEVICE)
    windows = torch.tensor(lens, device=DEVICE)
    scored = windows + req % 3
    queries = scored.clamp_min(1)
    layout = TokenLayout.build(
        queries,
        windows,
        scored_lens=scored,
        num_tokens=int(queries.sum()),
        num_scored=int(scored.sum()),
    ).check()
    temperatures = torch.tensor([1.0, 0.0, 0.8, 1.3], device=DEVICE)[req % 4]
    coupled = req % 3 == 1
    seeds = torch.randint(1 << 62, (num,), generator=generator).to(DEVICE)
    positions = 11 * req + 5
    logits = randn(layout.num_scored, vocab) * 2
    draft_logits = randn(num, DRAFTS, vocab) * apart
    draft_ids = torch.zeros(num, DRAFTS, dtype=torch.int64, device=DEVICE)
    rows = (layout.window_start[:, None] + torch.arange(DRAFTS, device=DEVICE)).clamp_max(
        layout.num_scored - 1
    )
    draft_logits += logits[rows]
    draft_logits /= torch.where(temperatures > 0, temperatures, 1.0)[:, None, None]
    purposes = plain_keys.block_purposes(coupled, positions - 1)
    for k in range(DRAFTS):
        keys = DrawKeys(seeds, positions + k, purposes)
        draws = plain_keys.KeyedDraws()
        chosen = draws.categorical(draft_logits[:, k], keys)
        draft_ids[:, k] = torch.where(temperatures > 0, chosen, draft_logits[:, k].argmax(-1))
    peaks = draft_logits.amax(-1)
    normalisers = torch.stack([peaks, (draft_logits - peaks[..., None]).exp().sum(-1)], dim=-1)
    return World(
        logits,
        layout,
        draft_ids,
        draft_logits,
        normalisers,
        temperatures,
        coupled,
        seeds,
        positions,
    )


def assert_same(found: tuple[Verdict, Tensor], wanted: Verdict) -> None:
    ours, req_of_emitted = found
    num = len(wanted.token_ids)
    assert ours.num_accepted.tolist() == wanted.num_accepted.tolist()
    assert ours.emitted_start_loc.tolist() == wanted.emitted_start_loc.tolist()
    assert ours.token_ids[:num].tolist() == wanted.token_ids.tolist()
    assert ours.scored_index[:num].tolist() == wanted.scored_index.tolist()
    counts = wanted.emitted_start_loc.diff()
    reqs = torch.arange(len(counts), device=DEVICE).repeat_interleave(counts)
    assert req_of_emitted[:num].tolist() == reqs.tolist()
    for padded in (ours.token_ids, ours.scored_index, req_of_emitted):
        assert len(padded) == len(counts) * (DRAFTS + 1)
        assert (padded[num:] == -1).all()


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("vocab", [3, 700, 5000])
def test_the_verdict_is_the_plain_one(vocab: int, points: bool) -> None:
    lens = [4, 4, 4, 4, 1, 1, 1, 1, 0, 3, 2, 4][: 12 if vocab < 5000 else 9]
    world = make_world(vocab, lens, seed=vocab)
    wanted = world.plain(points)
    assert_same(world.ours(points), wanted)
    if vocab == 3 and not points:  # every kind of end is there
        assert set(wanted.num_accepted.tolist()) >= {0, 1, 3}


def test_without_coins_q_is_not_read() -> None:
    world = make_world(3000, [4, 4, 4, 1, 0, 3])
    world = replace(world, coupled=torch.ones_like(world.coupled))
    wanted = world.plain()
    nowhere = replace(world, draft_logits=world.draft_logits * torch.nan)
    assert_same(nowhere.ours(coins=False), wanted)
    assert_same(world.ours(coins=True), wanted)


def test_where_p_is_q_a_rejection_draws_from_p() -> None:
    world = make_world(40, [2] * 6, apart=0.0)
    world = replace(world, coupled=torch.zeros_like(world.coupled))
    # Normalisers that make q twice p reject half the drafts, and leave nothing of p - q.
    half = world.normalisers * torch.tensor([1.0, 0.5], device=DEVICE)
    found, _ = replace(world, normalisers=half).ours()
    sampled = world.temperatures > 0
    rejected = (found.num_accepted == 0) & sampled
    assert rejected.any()
    rows = world.layout.window_start[rejected]
    p = world.logits[rows] / world.temperatures[rejected][:, None]
    recover = torch.full_like(rows, int(Purpose.RECOVER))
    keys = DrawKeys(world.seeds[rejected], world.positions[rejected], recover)
    wanted = plain_keys.KeyedDraws().proportional(p.softmax(-1), keys)
    assert found.token_ids[found.emitted_start_loc[:-1]][rejected].tolist() == wanted.tolist()


def test_a_draft_that_p_masks_is_never_accepted_nor_recovered() -> None:
    world = make_world(5000, [4] * 4)
    world = replace(
        world,
        coupled=torch.zeros_like(world.coupled),
        temperatures=torch.ones_like(world.temperatures),
    )
    rows = world.layout.window_start
    allowed = torch.full_like(world.logits, -torch.inf)
    allowed[:, [17, 4700]] = 0.0
    world.logits.copy_(allowed)
    world.draft_logits[:] = allowed[0]
    world.draft_logits[..., 2000] = 4.0
    world.draft_ids[:] = 2000
    assert len(rows) == 4
    found, _ = world.ours()
    assert found.num_accepted.tolist() == [0] * 4
    assert set(found.token_ids[:4].tolist()) <= {17, 4700}


def test_no_request_and_no_draft_are_windows_too() -> None:
    world = make_world(300, [1, 0, 1, 1])
    drafts = world.draft_ids[:, :0]
    found, _ = accept(
        Scored(world.logits),
        world.layout.window_start,
        world.layout.window_lens,
        drafts,
        None,
        None,
        temperatures=world.temperatures,
        coupled=world.coupled,
        seeds=world.seeds,
        first_positions=world.positions,
    )
    wanted = world.plain()
    assert found.token_ids[:3].tolist() == wanted.token_ids.tolist()
    assert found.token_ids[3:].tolist() == [-1]


NOTHING = (torch.nan, -torch.nan, torch.inf, -torch.inf)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's inf - inf
@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.parametrize("kind", range(len(NOTHING)))
def test_a_request_that_emits_from_no_distribution_ends_in_no_token(kind: int, vocab: int) -> None:
    """It alone, and only where the row is one that it emits from."""
    world = make_world(vocab, [4] * 12, seed=3)
    sound, _ = world.ours()
    bad, accepted = NOTHING[kind], sound.num_accepted
    assert {0, 3} <= set(accepted.tolist())
    start = world.layout.window_start
    logits = world.logits.clone()
    wanted = sound.token_ids.clone()
    for req, stood in enumerate(accepted.tolist()):
        # Every third a row behind the rejection, the others the last one that is emitted from.
        entry = stood + (req % 3 == 0)
        if entry < 4:
            row = logits[start[req] + entry]
            row[slice(None) if bad == -torch.inf else vocab - 1] = bad
        if entry == stood:
            wanted[sound.emitted_start_loc[req + 1] - 1] = -1
    found, _ = replace(world, logits=logits).ours()
    # A row of which nothing is left rejects where it would have accepted: what was read decides.
    assert found.num_accepted.tolist() == accepted.tolist()
    assert found.token_ids.tolist() == wanted.tolist()


def test_a_broken_row_that_accepts_its_draft_counts_too() -> None:
    world = make_world(40, [2] * 4)
    world = replace(world, temperatures=torch.zeros_like(world.temperatures))
    world.logits[world.layout.window_start, 7] = torch.nan
    world.draft_ids[:] = 7  # the argmax is where the NaN is
    found, _ = world.ours()
    assert found.num_accepted.tolist() == [1] * 4
    assert found.token_ids[:8].tolist() == [7, -1] * 4


def test_q_without_its_normalisers_is_refused() -> None:
    world = make_world(30, [2])
    with pytest.raises(ValueError, match="draft_normalisers"):
        replace(world, normalisers=None).ours()  # type: ignore[arg-type]
