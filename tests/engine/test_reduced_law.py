"""The law under a draft that knows two of three tokens: its own scatter, its own draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from emberline.batch import CommittedTokens, KVSpec
from emberline.drafters import DFlashDrafter, Drafter, DSparkDrafter
from emberline.drafters.markov import BiasTable, VanillaHead
from emberline.drafters.tables import scatter
from emberline.types import SamplingParams
from emberline.verify.planner import VerifyAll

from support.law import Speculation, assert_lawful

VOCAB, WIDTH, DRAFTS = 3, 4, 2
KNOWN = torch.tensor([0, 2])
GENERATOR = torch.Generator().manual_seed(12)
HEAD, W1, W2 = (
    torch.randn(rows, WIDTH, generator=GENERATOR, dtype=torch.float64)
    for rows in (len(KNOWN), VOCAB, len(KNOWN))
)
STATES = torch.randn(VOCAB, 16, WIDTH, generator=GENERATOR, dtype=torch.float64)


@dataclass
class FixedBackbone:
    """Hidden states by anchor and position; nothing is observed."""

    config: Any = field(
        default_factory=lambda: SimpleNamespace(
            max_draft_tokens=DRAFTS, taps=(), kv_spec=KVSpec(1, 1, 1)
        )
    )

    def forward(self, anchors: Tensor, positions: Tensor, _page_table: Tensor) -> Tensor:
        steps = torch.arange(DRAFTS)
        return STATES[anchors[:, None], (positions[:, None] + steps) % 16]

    def observe(self, committed: CommittedTokens) -> None:
        pass


def head(hidden: Tensor) -> Tensor:
    return scatter(hidden @ HEAD.T, KNOWN, VOCAB, -torch.inf)


def dspark() -> Drafter:
    markov = VanillaHead(W1, BiasTable(W2, KNOWN, VOCAB))
    return DSparkDrafter(FixedBackbone(), head, markov, None)  # type: ignore[arg-type]


def dflash() -> Drafter:
    return DFlashDrafter(FixedBackbone(), head)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("drafter", [dspark, dflash])
def test_tokens_that_the_draft_does_not_know_keep_their_chance(drafter: Any, rule: Any) -> None:
    assert_lawful(Speculation(drafter(), VerifyAll(), SamplingParams(accept=rule)))


def test_the_law_holds_at_other_temperatures() -> None:
    params = SamplingParams(temperature=0.6, accept="rejection")
    assert_lawful(Speculation(dspark(), VerifyAll(), params))
