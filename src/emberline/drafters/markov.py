"""DSpark's sequential head on a block's slots, and its confidence head: weights and arithmetic.

Must not know pages, draws or any checkpoint dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.drafters.tables import draft_ids, scatter
from emberline.models.weights import Weights


class MarkovHead(Protocol):
    """Turns the token before a slot into a bias on the slot's logits. r = rank."""

    @property
    def w2(self) -> BiasTable:
        """From latents to biases."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of w1. [B] int64 -> [B, r]."""
        ...

    def latent(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What `w2` turns into the bias of one slot.

        Args:
            hidden: [B, D], the slot's normed hidden state.
            previous: [B, r], `embed` of the token before the slot.
            state: what the slot before handed on; None at the block's start.

        Returns:
            latent [B, r], and the state for the next slot.
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

    def latent(
        self,
        hidden: Tensor,  # noqa: ARG002
        previous: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, r], unchanged."""
        return previous, state


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

    def latent(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[B, D], [B, r] -> [B, r]."""
        joined = torch.cat((hidden, previous), dim=-1)
        gate = torch.sigmoid(F.linear(joined, self.gate, self.gate_bias))
        return gate * previous, state


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

    def latent(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[B, D], [B, r], [B, r] -> [B, r], [B, r]."""
        state = torch.zeros_like(previous) if state is None else state
        joined = torch.cat((state, previous, hidden), dim=-1)
        gate, candidate, output = F.linear(joined, self.joint, self.joint_bias).chunk(3, dim=-1)
        # lerp(a, b, w) = a + w * (b - a), the convex mix with weight sigmoid(g) on the old state.
        state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
        return torch.tanh(output), state


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


def load_markov_head(
    weights: Weights,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: str,
    *,
    whole: bool = False,
) -> MarkovHead:
    """The sequential head whose tensors the checkpoint holds; which kind, their names tell.

    Under a reduced vocabulary (`d2t`) w2 has a row for each token that the draft knows. `whole`
    lays it out for kernels: rows one after another, of zeros for tokens that it does not know.

    Raises:
        ModelError: w1's rows are not the target's vocabulary, or a tensor is missing or misshapen.
    """
    rank = weights.take("markov_head.markov_w1.weight").shape[1]

    def take(name: str, *shape: int) -> Tensor:
        return weights.take(f"markov_head.{name}", shape).to(device=device, dtype=dtype)

    w1 = take("markov_w1.weight", vocab_size, rank)
    ids = draft_ids(weights, vocab_size).to(device) if weights.has("d2t") else None
    rows = vocab_size if ids is None else len(ids)
    w2 = _bias_table(take("markov_w2.weight", rows, rank), ids, vocab_size, whole)
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


def _bias_table(w2: Tensor, ids: Tensor | None, vocab_size: int, whole: bool) -> BiasTable:
    if not whole:
        return BiasTable(_stream(w2), ids, vocab_size)
    if ids is not None:
        w2 = w2.new_zeros(vocab_size, w2.shape[1]).index_copy_(0, ids, w2)
    return BiasTable(w2.contiguous(), None, vocab_size)


def _stream(w2: Tensor) -> Tensor:
    """The same [V, r], laid out so that one row times its transpose reads memory in order."""
    if w2.dtype == torch.bfloat16:
        return w2
    # Four times faster for one row in float32 on a CPU; bfloat16 kernels want rows together.
    return w2.t().contiguous().t()
