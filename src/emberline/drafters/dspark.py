"""DSpark: a block backbone, a sequential head on its slots, and a confidence head.

Owns the Markov heads, the left-to-right draw and the confidences. It must not know pages, the
block's attention or any checkpoint dialect.

The backbone gives every slot of the block its base logits at once; the sequential head then adds
a bias that depends on the token just drawn, so that the drafts of one block agree with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.batch import DraftContext, DraftProposal, DrawKeys
from emberline.drafters.block import BlockBackbone
from emberline.drafters.block_drafter import BlockDrafter
from emberline.drafters.tables import HeadFn, draft_ids, scatter
from emberline.models.weights import Weights
from emberline.sampling.keys import draw


class MarkovHead(Protocol):
    """Turns the token before a slot into a bias on the slot's logits. r = rank."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of w1. [B] int64 -> [B, r]."""
        ...

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Bias of one slot.

        Args:
            hidden: [B, D], the slot's normed hidden state.
            previous: [B, r], `embed` of the token before the slot.
            state: what the slot before handed on; None at the block's start.

        Returns:
            bias [B, V] in the logits' dtype, and the state for the next slot.
        """
        ...


@dataclass(frozen=True, slots=True)
class BiasTable:
    """w2: how a latent moves the logits. A draft of fewer tokens leaves the others' as they are."""

    weight: Tensor  # [Vd, r]
    token_ids: Tensor | None  # [Vd] int64, the rows' tokens; None: all V, in order
    vocab_size: int  # V

    def __call__(self, latent: Tensor) -> Tensor:
        """[B, r] -> [B, V] float32, or float64 if the head computes in it."""
        bias = F.linear(latent, self.weight)
        bias = bias if bias.dtype == torch.float64 else bias.float()
        ids = self.token_ids
        return bias if ids is None else scatter(bias, ids, self.vocab_size, 0.0)


@dataclass(frozen=True, slots=True)
class VanillaHead:
    """bias = w2(w1[previous]): a low-rank table of which token follows which."""

    w1: Tensor  # [V, r]
    w2: BiasTable

    def embed(self, token_ids: Tensor) -> Tensor:
        """[B] int64 -> [B, r]."""
        return F.embedding(token_ids, self.w1)

    def step(
        self,
        hidden: Tensor,  # noqa: ARG002
        previous: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, r] -> [B, V]."""
        return self.w2(previous), state


@dataclass(frozen=True, slots=True)
class GatedHead:
    """bias = w2(sigmoid(gate([hidden; e])) * e), e = w1[previous]."""

    w1: Tensor  # [V, r]
    w2: BiasTable
    gate: Tensor  # [r, D + r]
    gate_bias: Tensor  # [r]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[B] int64 -> [B, r]."""
        return F.embedding(token_ids, self.w1)

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[B, D], [B, r] -> [B, V]."""
        joined = torch.cat((hidden, previous), dim=-1)
        gate = torch.sigmoid(F.linear(joined, self.gate, self.gate_bias))
        return self.w2(gate * previous), state


@dataclass(frozen=True, slots=True)
class RnnHead:
    """A gated recurrence over the block: g, c, o = joint([state; e; hidden]) in three parts.

    state <- sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c); bias = w2(tanh(o)); it starts at 0.
    """

    w1: Tensor  # [V, r]
    w2: BiasTable
    joint: Tensor  # [3r, 2r + D]
    joint_bias: Tensor  # [3r]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[B] int64 -> [B, r]."""
        return F.embedding(token_ids, self.w1)

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[B, D], [B, r], [B, r] -> [B, V], [B, r]."""
        state = torch.zeros_like(previous) if state is None else state
        joined = torch.cat((state, previous, hidden), dim=-1)
        gate, candidate, output = F.linear(joined, self.joint, self.joint_bias).chunk(3, dim=-1)
        # lerp(a, b, w) = a + w * (b - a), the convex mix with weight sigmoid(g) on the old state.
        state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
        return self.w2(torch.tanh(output)), state


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """c = sigmoid(proj([hidden; w1[previous]]) / t): a draft's chance to survive, given the last.

    Trained on 1 - L1(p, q) / 2, the acceptance rate of the rejection rule. The temperature t of
    each position comes from calibration; ones leave the head as it was trained.
    """

    weight: Tensor  # [1, D + r], or [1, D] when it does not see the previous token
    bias: Tensor | None  # [1]
    temperatures: Tensor  # [K'] float32, K' >= K

    def __call__(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[B, K, D], [B, K, r] -> [B, K] float32 in [0, 1]."""
        if self.weight.shape[1] > hidden.shape[-1]:
            hidden = torch.cat((hidden, previous), dim=-1)
        logits: Tensor = F.linear(hidden, self.weight, self.bias)
        return torch.sigmoid(logits.float().squeeze(-1) / self.temperatures[: logits.shape[1]])


class DSparkDrafter(BlockDrafter):
    """Drafts a block left to right: base logits of all slots at once, then a bias a draw.

    Args:
        backbone, head, num_draft_tokens: see `BlockDrafter`.
        markov: the sequential head.
        confidence: None if the checkpoint has no confidence head.
    """

    def __init__(
        self,
        backbone: BlockBackbone,
        head: HeadFn,
        markov: MarkovHead,
        confidence: ConfidenceHead | None,
        num_draft_tokens: int | None = None,
    ) -> None:
        super().__init__(backbone, head, num_draft_tokens)
        self._markov = markov
        self._confidence = confidence

    @property
    def has_confidence(self) -> bool:
        """Whether proposals carry confidences."""
        return self._confidence is not None

    def propose(self, context: DraftContext) -> DraftProposal:
        """Draft K tokens a request, each from softmax((base + bias) / temperature)."""
        hidden, base = self.run_block(context)
        previous_ids, state = context.anchors, None
        token_ids: list[Tensor] = []
        drawn, embedded = [], []
        for slot in range(context.num_drafts):
            previous = self._markov.embed(previous_ids)
            bias, state = self._markov.step(hidden[:, slot], previous, state)
            keys = DrawKeys(context.seeds, context.positions + (slot + 1), context.purposes)
            logits = context.allowed(base[:, slot] + bias, token_ids)
            previous_ids, drawn_logits = draw(logits, context.temperatures, keys, context.draws)
            token_ids.append(previous_ids)
            embedded.append(previous)
            if context.need_logits:
                drawn.append(drawn_logits)
        confidence = None
        if self._confidence is not None:
            confidence = self._confidence(hidden, torch.stack(embedded, dim=1))
        return DraftProposal(
            token_ids=torch.stack(token_ids, dim=1),
            num_drafted=torch.full_like(context.anchors, context.num_drafts),
            logits=torch.stack(drawn, dim=1) if drawn else None,
            confidence=confidence,
        )


def load_markov_head(
    weights: Weights, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: str
) -> MarkovHead:
    """The sequential head whose tensors the checkpoint holds; which kind, their names tell.

    Under a reduced vocabulary (`d2t`) w2 has a row for each token that the draft knows.

    Raises:
        ModelError: w1's rows are not the target's vocabulary, or a tensor is missing or misshapen.
    """
    rank = weights.take("markov_head.markov_w1.weight").shape[1]

    def take(name: str, *shape: int) -> Tensor:
        return weights.take(f"markov_head.{name}", shape).to(device=device, dtype=dtype)

    w1 = take("markov_w1.weight", vocab_size, rank)
    ids = draft_ids(weights, vocab_size).to(device) if weights.has("d2t") else None
    rows = vocab_size if ids is None else len(ids)
    w2 = BiasTable(_stream(take("markov_w2.weight", rows, rank)), ids, vocab_size)
    if weights.has("markov_head.gate_proj.weight"):
        gate = take("gate_proj.weight", rank, hidden_size + rank)
        return GatedHead(w1, w2, gate, take("gate_proj.bias", rank))
    if weights.has("markov_head.joint_proj.weight"):
        joint = take("joint_proj.weight", 3 * rank, 2 * rank + hidden_size)
        return RnnHead(w1, w2, joint, take("joint_proj.bias", 3 * rank))
    return VanillaHead(w1, w2)


def load_confidence_head(
    weights: Weights,
    hidden_size: int,
    rank: int,
    temperatures: Sequence[float],
    dtype: torch.dtype,
    device: str,
) -> ConfidenceHead:
    """The confidence head; the width of its row tells whether it sees the previous token.

    `temperatures` are those of its calibration, one a draft of a block.

    Raises:
        ModelError: the row is neither D nor D + r wide.
    """
    name = "confidence_head.proj."
    columns = weights.take(name + "weight").shape[-1]
    width = columns if columns in (hidden_size, hidden_size + rank) else hidden_size + rank
    weight = weights.take(name + "weight", (1, width)).to(device=device, dtype=dtype)
    bias = None
    if weights.has(name + "bias"):
        bias = weights.take(name + "bias", (1,)).to(device=device, dtype=dtype)
    scale = torch.tensor(temperatures, dtype=torch.float32, device=device)
    return ConfidenceHead(weight, bias, scale)


def _stream(w2: Tensor) -> Tensor:
    """The same [V, r], laid out so that one row times its transpose reads memory in order."""
    if w2.dtype == torch.bfloat16:
        return w2
    # Four times faster for one row in float32 on a CPU; bfloat16 kernels want rows together.
    return w2.t().contiguous().t()
