"""What every drafter must hold to, and what the checkpoint loader must refuse.

A new drafter joins by one row in `CASES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from emberline.batch import CommittedTokens, DraftProposal, Purpose
from emberline.drafters import DRAFTERS, Drafter, NGramDrafter
from emberline.models.weights import ModelError

from support.drafter_world import (
    BLOCK,
    HIDDEN,
    LENGTHS,
    PAGE_SIZE,
    TAPS,
    VOCAB,
    TinyTarget,
    World,
    load,
)
from support.tiny_draft import DFLASH, EVERYONE, MIXED, ZLAB, draft_config, draft_tensors
from support.tiny_eagle3 import eagle3_config, eagle3_tensors
from support.tiny_standalone import tiny_standalone

CASES: dict[str, Callable[[Path], Drafter]] = {
    "dspark": lambda path: load(path, draft_config(), draft_tensors()),
    "dspark-gated": lambda path: load(path, draft_config(), draft_tensors("gated")),
    "dspark-rnn": lambda path: load(path, draft_config(), draft_tensors("rnn")),
    "dspark-bias": lambda path: load(
        path, draft_config(attention_bias=True), draft_tensors(bias=True)
    ),
    "dspark-short": lambda path: load(path, draft_config(), draft_tensors(), num_draft_tokens=2),
    "dspark-bfloat16": lambda path: load(
        path, draft_config(), draft_tensors(), dtype=torch.bfloat16
    ),
    "dflash": lambda path: load(path, draft_config(**DFLASH), draft_tensors(None)),
    "dflash-shifted": lambda path: load(path, draft_config(**ZLAB), draft_tensors(None)),
    "eagle3": lambda path: load(path, eagle3_config(), eagle3_tensors()),
    "eagle3-two": lambda path: load(
        path, eagle3_config(num_hidden_layers=2), eagle3_tensors(num_layers=2)
    ),
    "eagle3-bfloat16": lambda path: load(
        path, eagle3_config(), eagle3_tensors(), dtype=torch.bfloat16
    ),
    "standalone": lambda path: tiny_standalone(path),
    "ngram": lambda _path: NGramDrafter(num_draft_tokens=4, min_match=1),
}


@pytest.fixture(params=CASES)
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    return CASES[request.param](tmp_path / "draft")


def assert_same_rows(ours: DraftProposal, row: int, theirs: DraftProposal, other: int) -> None:
    assert ours.num_drafted[row] == theirs.num_drafted[other]
    assert torch.equal(ours.token_ids[row], theirs.token_ids[other])
    for name in ("logits", "confidence"):
        left, right = getattr(ours, name), getattr(theirs, name)
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left[row], right[other], atol=1e-5, rtol=0)


def test_every_algorithm_is_covered(tmp_path: Path) -> None:
    assert {name.split("-")[0] for name in CASES} == set(DRAFTERS)
    for name, build in CASES.items():
        assert type(build(tmp_path / name)) is DRAFTERS[name.split("-")[0]]


def test_proposal_has_the_promised_shape(drafter: Drafter) -> None:
    proposal = World(drafter).observe_all().propose(EVERYONE, MIXED)
    most = drafter.max_draft_tokens
    assert proposal.token_ids.shape == (4, most)
    assert proposal.token_ids.dtype == proposal.num_drafted.dtype == torch.int64
    assert ((proposal.token_ids >= 0) & (proposal.token_ids < VOCAB)).all()
    assert ((proposal.num_drafted >= 0) & (proposal.num_drafted <= most)).all()
    if proposal.logits is not None:
        assert proposal.logits.shape == (4, most, VOCAB)
        assert proposal.logits.dtype == torch.float32
        assert proposal.logits.isfinite().all()
    if proposal.confidence is not None:
        assert proposal.confidence.shape == (4, most)
        assert proposal.confidence.dtype == torch.float32
        assert ((proposal.confidence >= 0) & (proposal.confidence <= 1)).all()


def test_q_is_what_was_drawn_from(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    proposal = world.propose(EVERYONE, MIXED)
    if proposal.logits is None:
        assert not world.draws.seen  # a point mass needs no randomness
        return
    drawn = {}
    for logits, keys, ids in world.draws.seen:
        for row in range(len(ids)):
            key = (int(keys.seeds[row]), int(keys.positions[row]), int(keys.purposes[row]))
            assert key not in drawn, "two draws shared their noise"
            drawn[key] = (logits[row], int(ids[row]))
    assert len(drawn) == 3 * drafter.max_draft_tokens
    for req in EVERYONE:
        for slot in range(drafter.max_draft_tokens):
            logits, token = proposal.logits[req, slot], int(proposal.token_ids[req, slot])
            if MIXED[req] == 0:
                assert token == int((logits == logits.max()).nonzero()[0])
                continue
            purpose = Purpose.TARGET if req % 2 else Purpose.DRAFT
            from_logits, drawn_id = drawn[req * 1000 + 17, LENGTHS[req] + slot + 1, int(purpose)]
            assert torch.equal(from_logits, logits)
            assert drawn_id == token


def test_logits_only_when_somebody_reads_them(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    full = world.propose(EVERYONE, MIXED)
    bare = world.propose(EVERYONE, MIXED, need_logits=False)
    assert bare.logits is None
    assert torch.equal(bare.token_ids, full.token_ids)


def test_result_ignores_neighbours_and_page_ids(drafter: Drafter) -> None:
    together = World(drafter).observe_all().propose(EVERYONE, MIXED)
    other = World(drafter, page_seed=9).observe_all()
    for reqs in ([0], [1], [2], [3], [2, 0], [3, 1]):
        proposal = other.propose(reqs, [MIXED[req] for req in reqs])
        for row, req in enumerate(reqs):
            assert_same_rows(proposal, row, together, req)


def test_temperature_of_a_neighbour_changes_nothing(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    mixed, greedy = world.propose(EVERYONE, MIXED), world.propose(EVERYONE, [0.0] * 4)
    assert_same_rows(mixed, 0, greedy, 0)
    assert_same_rows(mixed, 2, world.propose(EVERYONE, [0.0, 0.0, 1.0, 0.0]), 2)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_context_in_chunks_is_the_context_at_once(drafter: Drafter, chunk: int) -> None:
    at_once = World(drafter).observe_all().propose(EVERYONE, MIXED)
    chunked = World(drafter, page_seed=5).observe_all(chunk).propose(EVERYONE, MIXED)
    for req in EVERYONE:
        assert_same_rows(chunked, req, at_once, req)


def test_what_lies_past_the_anchor_is_not_read(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    clean = world.propose(EVERYONE, MIXED)
    for req, length in enumerate(LENGTHS):
        world.tokens[req, length + 1 :] = 0
        junk = torch.full((12, len(TAPS) * HIDDEN), 1e3)
        world.observe(req, length, length + 12, junk)
    dirty = world.propose(EVERYONE, MIXED)
    for req in EVERYONE:
        assert_same_rows(dirty, req, clean, req)


def test_context_is_read(drafter: Drafter) -> None:
    if not drafter.taps:
        pytest.skip("has no context but the token list")
    world = World(drafter).observe_all()
    before = world.propose([2], [0.0])
    world.observe(2, 0, 1, torch.full((1, len(TAPS) * HIDDEN), -1.0))
    after = world.propose([2], [0.0])
    assert before.logits is not None
    assert after.logits is not None
    assert not torch.allclose(before.logits, after.logits, atol=1e-4)


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_what_a_broken_request_leaves_is_finite(tmp_path: Path, name: str) -> None:
    """Its pages are cleared as soon as it has failed, and its last rows are written behind that."""
    world = World(CASES[name](tmp_path))
    world.observe(0, 0, 3, torch.full((3, len(TAPS) * HIDDEN), float("nan")))
    for pool in world.drafter.kv_pools:
        assert pool.keys.isfinite().all()
        assert pool.values.isfinite().all()
        assert not pool.values[:, world.page_table[0, 0] * PAGE_SIZE].any()


def test_observing_nothing_is_allowed(drafter: Drafter) -> None:
    World(drafter).observe(0, 0, 0)


# What the block drafters promise beyond that.


def test_fewer_drafts_are_a_prefix(tmp_path: Path) -> None:
    whole = World(CASES["dspark"](tmp_path / "a")).observe_all().propose(EVERYONE, MIXED)
    short = World(CASES["dspark-short"](tmp_path / "b")).observe_all().propose(EVERYONE, MIXED)
    assert torch.equal(short.token_ids, whole.token_ids[:, :2])
    assert short.logits is not None
    assert whole.logits is not None
    torch.testing.assert_close(short.logits, whole.logits[:, :2])
    with pytest.raises(ModelError, match=r"in \[1, 5\].*got 6"):
        load(tmp_path / "c", draft_config(), draft_tensors(), num_draft_tokens=6)


def test_shifted_slots_are_the_same_slots_one_later(tmp_path: Path) -> None:
    anchor = World(CASES["dflash"](tmp_path / "a")).observe_all().propose(EVERYONE, [0.0] * 4)
    shifted = World(CASES["dflash-shifted"](tmp_path / "b")).observe_all()
    assert shifted.drafter.max_draft_tokens == BLOCK - 1
    assert torch.equal(shifted.propose(EVERYONE, [0.0] * 4).token_ids, anchor.token_ids[:, 1:])


class DoubleTarget(TinyTarget):
    """In float64, where what two row counts round differently is far under a tolerance."""

    def __init__(self, row_granule: int) -> None:
        super().__init__()
        self.row_granule = row_granule

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.matrix.double().T


def test_padding_slots_are_not_seen(tmp_path: Path) -> None:
    a, b = (
        World(
            load(
                tmp_path / str(row_granule),
                draft_config(),
                draft_tensors(),
                DoubleTarget(row_granule),
                dtype=torch.float64,
            )
        )
        .observe_all()
        .propose(EVERYONE, MIXED)
        for row_granule in (1, 8)
    )
    for req in EVERYONE:
        assert_same_rows(a, req, b, req)


def test_coupling_is_a_purpose_not_a_seed(tmp_path: Path) -> None:
    world = World(CASES["dflash"](tmp_path)).observe_all()
    apart = world.propose([0], [1.0], purposes=torch.tensor([int(Purpose.DRAFT)]))
    coupled = world.propose([0], [1.0], purposes=torch.tensor([int(Purpose.TARGET)]))
    assert torch.equal(apart.logits, coupled.logits)
    assert not torch.equal(apart.token_ids, coupled.token_ids)


def test_confidence_without_the_previous_token(tmp_path: Path) -> None:
    tensors = draft_tensors()
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :HIDDEN]
    narrow = World(load(tmp_path / "narrow", draft_config(), tensors)).observe_all()
    wide = World(CASES["dspark"](tmp_path / "wide")).observe_all()
    for world, same in ((narrow, True), (wide, False)):
        a, b = (world.propose([1], [2.0], seeds=torch.tensor([seed])) for seed in (1, 2))
        assert not torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.confidence, b.confidence) is same


def test_confidence_head_is_optional(tmp_path: Path) -> None:
    tensors = {n: t for n, t in draft_tensors().items() if not n.startswith("confidence")}
    drafter = load(tmp_path, draft_config(enable_confidence_head=False), tensors)
    assert World(drafter).observe_all().propose([0], [0.0]).confidence is None


TEMPERATURES = (0.5, 2.0, 1.0, 0.25, 4.0)


@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_calibration_divides_each_position_s_logit(
    tmp_path: Path, num_draft_tokens: int | None
) -> None:
    def propose(name: str, temperatures: tuple[float, ...] | None) -> DraftProposal:
        drafter = load(tmp_path / name, draft_config(), draft_tensors(),
                       num_draft_tokens=num_draft_tokens, temperatures=temperatures)  # fmt: skip
        return World(drafter).observe_all().propose(EVERYONE, MIXED)

    plain, ones = propose("plain", None), propose("ones", (1.0,) * BLOCK)
    calibrated = propose("calibrated", TEMPERATURES)
    assert plain.confidence is not None
    assert ones.confidence is not None
    assert calibrated.confidence is not None
    assert torch.equal(ones.confidence, plain.confidence)
    used = torch.tensor(TEMPERATURES)[: plain.confidence.shape[1]]
    expected = torch.sigmoid(torch.logit(plain.confidence) / used)
    torch.testing.assert_close(calibrated.confidence, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(calibrated.confidence, plain.confidence, atol=1e-2)
    # The drafts and what they were drawn from are untouched.
    assert torch.equal(calibrated.token_ids, plain.token_ids)
    assert torch.equal(calibrated.logits, plain.logits)


def test_a_calibration_of_another_block_is_refused(tmp_path: Path) -> None:
    for num_draft_tokens in (None, 2):
        with pytest.raises(ModelError, match=r"with 2 temperatures, but its block has 5 drafts"):
            load(tmp_path, draft_config(), draft_tensors(), num_draft_tokens=num_draft_tokens,
                 temperatures=(1.0, 2.0))  # fmt: skip


def test_a_calibration_without_confidences_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="calibrated, but without confidences"):
        load(tmp_path, draft_config(**DFLASH), draft_tensors(None), temperatures=TEMPERATURES)


def test_block_draft_needs_taps(tmp_path: Path) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    committed = CommittedTokens(*[nothing] * 7, None)
    with pytest.raises(ValueError, match="needs the target's taps"):
        CASES["dflash"](tmp_path).observe(committed)
