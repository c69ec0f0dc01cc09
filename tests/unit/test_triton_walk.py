"""The walk over a block against the plain heads and draws."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from emberline.batch import DrawKeys, DrawnBlock
from emberline.drafters.markov import BiasTable, ConfidenceHead, VanillaHead
from emberline.ops.triton.walk import markov_walk
from emberline.sampling.keys import KeyedDraws, block_purposes
from emberline.sampling.keys import draw as plain_draw

from support.triton_kernels import DEVICE, exact_products

__all__ = ["exact_products"]
pytestmark = pytest.mark.usefixtures("exact_products")


@dataclass(frozen=True)
class World:
    """Blocks to walk over."""

    base: Tensor  # [B, K, V]
    hidden: Tensor  # [B, K, D]
    anchors: Tensor  # [B]
    w1: Tensor  # [V, r]
    w2: Tensor  # [V, r]
    temperatures: Tensor  # [B]
    keys: DrawKeys
    confidence: ConfidenceHead | None

    def ours(self, need_logits: bool) -> DrawnBlock:
        return markov_walk(
            self.base,
            self.hidden,
            self.anchors,
            self.w1,
            self.w2,
            temperatures=self.temperatures,
            keys=self.keys,
            need_logits=need_logits,
            confidence=self.confidence,
        )

    def plain(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids [B, K], drawn logits [B, K, V] and confidences [B, K], slot by slot in float32."""
        head = VanillaHead(self.w1.float(), BiasTable(self.w2.float(), None, self.base.shape[-1]))
        ids, drawn, embedded = [], [], []
        previous = self.anchors
        for slot in range(self.base.shape[1]):
            latent = head.embed(previous)
            bias = head.w2(latent)
            keys = replace(self.keys, positions=self.keys.positions + slot + 1)
            logits = self.base[:, slot].float() + bias
            previous, row = plain_draw(logits, self.temperatures, keys, KeyedDraws())
            ids.append(previous)
            drawn.append(row)
            embedded.append(latent)
        confidence = None
        if self.confidence is not None:
            conf = self.confidence
            bias = None if conf.bias is None else conf.bias.float()
            plain = ConfidenceHead(conf.weight.float(), bias, conf.temperatures)
            confidence = plain(self.hidden.float(), torch.stack(embedded, dim=1))
        return torch.stack(ids, dim=1), torch.stack(drawn, dim=1), confidence


def make_world(
    num_reqs: int,
    vocab: int,
    *,
    rank: int = 32,
    drafts: int = 3,
    coupled: str = "all",
    dtype: torch.dtype = torch.float32,
    wide: bool = True,
    biased: bool = True,
) -> World:
    generator = torch.Generator().manual_seed(num_reqs * vocab + rank)
    dim = 24

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    req = torch.arange(num_reqs, device=DEVICE)
    shares = {"all": req >= 0, "none": req < 0, "some": req % 2 == 0}[coupled]
    positions = 13 * req + 7
    seeds = torch.randint(1 << 62, (num_reqs,), generator=generator).to(DEVICE)
    return World(
        base=randn(num_reqs, drafts, vocab),
        hidden=randn(num_reqs, drafts, dim),
        anchors=torch.randint(vocab, (num_reqs,), generator=generator).to(DEVICE),
        w1=randn(vocab, rank),
        w2=randn(vocab, rank) / rank**0.5,
        temperatures=torch.tensor([0.0, 1.0, 0.7, 1.6], device=DEVICE)[req % 4],
        keys=DrawKeys(seeds, positions, block_purposes(shares, positions)),
        confidence=ConfidenceHead(
            weight=randn(1, dim + rank if wide else dim) / 4,
            bias=randn(1) if biased else None,
            temperatures=torch.tensor([1.0, 0.8, 1.3, 1.1], device=DEVICE),
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_reqs", "vocab", "rank"),
    [(1, 700, 32), (1, 70, 200), (4, 700, 5), (3, 600, 200), (18, 300, 48)],
)
def test_coupled_and_greedy_blocks_are_the_plain_ones(
    num_reqs: int, vocab: int, rank: int, dtype: torch.dtype
) -> None:
    world = make_world(num_reqs, vocab, rank=rank, dtype=dtype)
    walk = world.ours(need_logits=False)
    ids, _, confidence = world.plain()
    assert walk.token_ids.tolist() == ids.tolist()
    torch.testing.assert_close(walk.confidence, confidence, rtol=1e-4, atol=1e-5)
    assert walk.logits is walk.normalisers is None


@pytest.mark.parametrize("coupled", ["none", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q_is_what_drafts_were_drawn_from(coupled: str, dtype: torch.dtype) -> None:
    world = make_world(4, 700, coupled=coupled, dtype=dtype)
    walk = world.ours(need_logits=True)
    ids, drawn, confidence = world.plain()
    assert walk.token_ids.tolist() == ids.tolist()
    torch.testing.assert_close(walk.confidence, confidence, rtol=1e-4, atol=1e-5)
    assert walk.logits is not None
    assert walk.normalisers is not None
    by_own = (world.temperatures > 0) & (world.keys.purposes != 0)
    assert by_own.any()
    q = walk.logits[by_own]
    torch.testing.assert_close(q, drawn[by_own], rtol=1e-5, atol=1e-5)
    peaks, masses = walk.normalisers[by_own].unbind(-1)
    assert torch.equal(peaks, q.amax(-1))
    torch.testing.assert_close(masses, (q - peaks[..., None]).exp().sum(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("need_logits", [False, True])
@pytest.mark.parametrize(("wide", "biased"), [(False, True), (True, False)])
def test_every_confidence_head_is_the_plain_one(
    wide: bool, biased: bool, need_logits: bool
) -> None:
    world = make_world(2, 40, wide=wide, biased=biased)
    walk = world.ours(need_logits)
    ids, _, confidence = world.plain()
    assert walk.token_ids.tolist() == ids.tolist()
    torch.testing.assert_close(walk.confidence, confidence, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("need_logits", [False, True])
def test_without_a_confidence_head_there_are_no_confidences(need_logits: bool) -> None:
    world = replace(make_world(2, 40), confidence=None)
    walk = world.ours(need_logits)
    assert walk.token_ids.tolist() == world.plain()[0].tolist()
    assert walk.confidence is None


def test_a_slot_of_another_head_is_a_walk_over_its_latents() -> None:
    world = make_world(3, 60)
    latents = torch.randn(3, 32, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    one = replace(
        world,
        base=world.base[:, 1:2].contiguous(),
        hidden=world.hidden[:, 1:2].contiguous(),
        w1=latents,
        anchors=torch.arange(3, device=DEVICE),
        confidence=None,
    )
    wanted, _ = plain_draw(
        one.base[:, 0] + latents @ world.w2.T,
        world.temperatures,
        replace(world.keys, positions=world.keys.positions + 1),
        KeyedDraws(),
    )
    assert one.ours(need_logits=False).token_ids[:, 0].tolist() == wanted.tolist()


def test_what_does_not_fit_is_refused() -> None:
    world = make_world(2, 40)
    with pytest.raises(ValueError, match=r"w2 must be \[40, 32\].*\[39, 32\]"):
        replace(world, w2=world.w2[:39]).ours(need_logits=False)
    with pytest.raises(ValueError, match="w1 must be contiguous"):
        replace(world, w1=world.w1.t().contiguous().t()).ours(need_logits=False)
