"""Every tensor-carrying value that crosses a file. Frozen: made by one file, read by the others.

Letters in shapes: B requests in the step, T live tokens, Q scored tokens, N emitted tokens,
K most drafts a request, V vocabulary, A tapped width, M pages a request, C tokens committed,
S request slots, L top-k width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from emberline.layout import Scored, TokenLayout, Tokens


class Purpose(IntEnum):
    """What a draw is for. Part of its key: no two decisions share noise by accident."""

    TARGET = 0  # a draw under coupled: the draft's and the target's at a position are the same one
    DRAFT = 1  # a draft under rejection; each block's draws have a number of their own
    ACCEPT = 2  # the coin of a draft's acceptance
    RECOVER = 3  # the draw from max(p - q, 0)
    BONUS = 4  # under rejection, the target's own draw: plain decode, and after the last draft


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """Names N draws by (seed, position, purpose): a result never depends on the batch around it."""

    seeds: Tensor  # [N] int64
    positions: Tensor  # [N] int64, sequence position of the token being drawn
    purposes: Tensor  # [N] int64


class Draws(Protocol):
    """The engine's only source of randomness. Tests replace it to enumerate a law exactly."""

    def categorical(self, logits: Tensor, keys: DrawKeys) -> Tensor:
        """Draw one id a row from softmax(logits). [N, V] -> [N] int64."""
        ...

    def proportional(self, weights: Tensor, keys: DrawKeys) -> Tensor:
        """Draw one id a row with chances in proportion to weights >= 0. [N, V] -> [N] int64."""
        ...

    def coin(self, probs: Tensor, keys: DrawKeys) -> Tensor:
        """True with the given probability. [N] -> [N] bool."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of the KV that some layers keep in the pages."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    lookahead: int = 0  # by how many positions a prefix match is shortened (EAGLE-3: 1)
    window: int | None = None  # tokens the furthest-looking layer sees, itself included; None: all
    value_dim: int | None = None  # of the values where they have another width than the keys

    @property
    def numbers_per_token(self) -> int:
        """Keys and values that a token takes, all layers together."""
        width = self.head_dim + (self.value_dim or self.head_dim)
        return self.num_layers * self.num_kv_heads * width


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the target runs in one step."""

    layout: TokenLayout
    token_ids: Tokens  # [T] int64
    positions: Tokens  # [T] int64
    slot_mapping: Tokens  # [T] int64: page * page_size + offset in page
    page_table: Tensor  # [B, M] int64, padded with page 0
    seq_lens: Tensor  # [B] int64: tokens in KV once this step has run


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What the target says."""

    logits: Scored  # [Q, V] float32; float64 if it computes in it; with kernels its own dtype
    taps: Tokens | None  # [T, A] tapped layers' raw outputs, concatenated in tap order


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a step before anything is drafted: all that a depth may depend on."""

    num_known: int  # tokens forwarded besides drafts: prompt chunks and anchors
    num_emitting: int  # requests that emit at least one token
    serials: tuple[int, ...]  # [B], name of each request in this engine, never used again
    draft_limits: tuple[int, ...]  # [B], most drafts each may draw; 0: it does not draft
    predicted: tuple[float, ...] = ()  # [B] chance of each predicted draft; 0: the drafter drafts

    def chance(self, req: int) -> float:
        """Of each draft that comes from a request's prediction; 0 where the drafter drafts."""
        return self.predicted[req] if self.predicted else 0.0


class DraftConstraint(Protocol):
    """What may follow which drafts, for the requests that a grammar binds."""

    def mask(self, logits: Tensor, drafts: Sequence[Tensor]) -> Tensor:
        """Put what may not come next at minus infinity.

        Args:
            logits: [B, V] of the next slot; not written to.
            drafts: [B] int64 ids of each slot before it.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may know. Only requests that draft are in it: B here is their number."""

    num_drafts: int  # K of the proposal, 1 .. the drafter's own maximum
    req_index: Tensor  # [B] int64, slot of the request
    anchors: Tensor  # [B] int64, last committed token: emitted, no KV yet
    positions: Tensor  # [B] int64, the anchor's position = tokens with KV before it
    page_table: Tensor  # [B, M] int64
    history: Tensor  # [S, max_model_len] int64, tokens by slot; valid up to and with the anchor
    temperatures: Tensor  # [B] float32, 0 = greedy
    seeds: Tensor  # [B] int64
    purposes: Tensor  # [B] int64, of this block's draws: `sampling.keys.block_purposes`
    need_logits: bool  # False: nobody will read q (all greedy or coupled)
    draws: Draws
    constraint: DraftConstraint | None = None  # None: no request is bound by a grammar

    def allowed(self, logits: Tensor, drafts: Sequence[Tensor]) -> Tensor:
        """What a slot may be drawn from, given the drafts before it: see `DraftConstraint`."""
        return logits if self.constraint is None else self.constraint.mask(logits, drafts)


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Drafts, and exactly what they were drawn from."""

    token_ids: Tensor  # [B, K] int64, K = `DraftContext.num_drafts`
    num_drafted: Tensor  # [B] int64, 0 .. K
    logits: Tensor | None  # [B, K, V] float: q = softmax of it; None: each draft is a point mass
    confidence: Tensor | None  # [B, K] float32 in [0, 1], each given that all before it survived


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What a drafter may know in a step that a graph captures. B may be that of a bucket."""

    num_drafts: int  # K of the block, 1 .. the drafter's own maximum
    anchors: Tensor  # [B] int64, last committed token; 0 where no request lives
    positions: Tensor  # [B] int64, the anchor's position = tokens with KV before it
    page_table: Tensor  # [B, M] int64
    temperatures: Tensor  # [B] float32, 0 = greedy
    keys: DrawKeys  # [B], at the anchor's position; purposes as `sampling.keys.block_purposes`
    need_logits: bool  # False: nobody will read q (all greedy or coupled)


@dataclass(frozen=True, slots=True)
class DrawnBlock:
    """Drafts of B blocks, and what they were drawn from."""

    token_ids: Tensor  # [B, K] int64
    logits: Tensor | None  # [B, K, V] float32, q = softmax of it; only where a q will be read
    normalisers: Tensor | None  # [B, K, 2] float32 of those: the largest, sum of exp(they - it)
    confidence: Tensor | None  # [B, K] float32 in [0, 1], each given that all before it survived


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """Tokens whose target KV became final in this step, with what a drafter needs to follow.

    Request-major, in sequence order; every request of the step commits at least one.
    """

    lens: Tensor  # [B] int64, tokens of each request; they add up to C
    page_table: Tensor  # [B, M] int64
    token_ids: Tensor  # [C] int64
    following_ids: Tensor  # [C] int64, the next token of the sequence, known by now
    positions: Tensor  # [C] int64
    slot_mapping: Tensor  # [C] int64
    req_index: Tensor  # [C] int64
    taps: Tensor | None  # [C, A]


@dataclass(frozen=True, slots=True)
class Admission:
    """How much of each block is verified."""

    num_admitted: Tensor  # [B] int64, drafts verified: 0 .. num_drafted
    num_draft_tokens: int  # their sum, on the host so that T is known


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step emits. Entry i of a request's run was drawn from entry i of its window."""

    num_accepted: Tensor  # [B] int64
    token_ids: Tensor  # [N] int64, request-major
    scored_index: Tensor  # [N] int64, the logits row each id was drawn from
    emitted_start_loc: Tensor  # [B + 1] int64


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of N tokens, nats, float32."""

    token_ids: Tensor  # [N] int64
    logprobs: Tensor  # [N]
    ranks: Tensor  # [N] int64, 1-based, ties share the better rank
    top_ids: Tensor  # [N, L] int64, most likely first, ties to the lowest id
    top_logprobs: Tensor  # [N, L]
