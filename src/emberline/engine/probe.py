"""Which reading of a draft's files is right: its blocks against what the target says.

Owns the readings that are tried and the teacher-forced blocks. A wrong slot rule or layer id does
not crash, it only ruins acceptance: here that is measured, on text that the target wrote. Must not
know prompts or how a result is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from statistics import fmean, stdev

import torch
from torch import Tensor

from emberline.batch import CommittedTokens, DraftContext, ForwardBatch, Purpose
from emberline.config import SlotRule
from emberline.drafters.base import Drafter
from emberline.drafters.block_config import DraftConfig
from emberline.drafters.checkpoint import make_drafter
from emberline.drafters.dialects import DraftCheckpoint
from emberline.drafters.eagle3_backbone import Eagle3Config
from emberline.drafters.geometry import read_geometry
from emberline.layout import TokenLayout, Tokens
from emberline.models.target import Target
from emberline.sampling.keys import KeyedDraws

BLOCKS = 10
MARGIN = 0.2  # tokens a step; a lead below it says nothing, however steady
STANDARD_ERRORS = 2.0
STRIDE = 5  # tokens from one anchor to the next
SHIFTS = (-1, 0, 1)  # of all layer ids together
DRAFT_PURPOSE = int(Purpose.DRAFT)

Geometry = DraftConfig | Eagle3Config


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read the files."""

    slot_rule: SlotRule | None  # None: not a block draft
    shift: int  # of the layer ids, 0 = as the files say
    config: Geometry


@dataclass(frozen=True, slots=True)
class Probed:
    """What a reading's drafts were worth."""

    reading: Reading
    accepted: tuple[int, ...]  # drafts that agree with the target's greedy text, by block

    @property
    def accept_length(self) -> float:
        """Tokens a step, the verifier's own included."""
        return 1 + sum(self.accepted) / len(self.accepted)

    def beats(self, other: Probed) -> bool:
        """Whether by more than noise: the same blocks, compared one by one."""
        leads = [mine - theirs for mine, theirs in zip(self.accepted, other.accepted, strict=True)]
        lead = fmean(leads)
        error = stdev(leads) / len(leads) ** 0.5 if len(leads) > 1 else inf
        return lead >= MARGIN and lead > STANDARD_ERRORS * error


@dataclass(frozen=True, slots=True)
class Text:
    """What the target wrote after a prompt, greedily."""

    tokens: Tensor  # [n] int64, the prompt first
    taps: Tensor  # [n - 1, A]: the last token has not run
    num_prompt: int


def readings(checkpoint: DraftCheckpoint, depth: int | None) -> tuple[Reading, ...]:
    """All readings that a target of `depth` layers allows; what the files say comes first.

    Without a depth no layer beyond those that the files name is tried.
    """
    rules: tuple[SlotRule | None, ...] = (checkpoint.slot_rule,)
    if checkpoint.slot_rule is not None:
        rules += ("shifted" if checkpoint.slot_rule == "anchor" else "anchor",)
    found = []
    for rule in rules:
        config = read_geometry(replace(checkpoint, slot_rule=rule))
        for shift in sorted(SHIFTS, key=abs):
            taps = tuple(tap + shift for tap in config.taps)
            if min(taps) >= -1 and max(taps) < (depth or 1 + max(config.taps)):
                found.append(Reading(rule, shift, replace(config, taps=taps)))
    return tuple(found)


def leaders(found: Sequence[Probed]) -> tuple[Probed, ...]:
    """The best reading, then those that it does not beat: more than one cannot be told apart."""
    best = max(found, key=lambda one: one.accept_length)
    tied = [one for one in found if one is not best and not best.beats(one)]
    return (best, *sorted(tied, key=lambda one: -one.accept_length))


def tapped(candidates: Sequence[Reading]) -> tuple[int, ...]:
    """Every layer that some reading taps, in order."""
    return tuple(sorted({tap for reading in candidates for tap in reading.config.taps}))


class Pages:
    """One request's pages: all there are, in order, the scratch page 0 left out."""

    def __init__(self, num_pages: int, page_size: int, device: str) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = device
        self.table = torch.arange(1, num_pages, device=device)[None]

    def slots(self, positions: Tensor) -> Tensor:
        """[n] positions to slots."""
        return self.table[0, positions // self.page_size] * self.page_size + (
            positions % self.page_size
        )

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return (self.num_pages - 1) * self.page_size


def write_text(
    target: Target, prompt: Sequence[int], length: int, eos_ids: frozenset[int], pages: Pages
) -> Text:
    """The target's greedy continuation of `prompt` by up to `length` tokens, with its taps."""
    tokens, taps, start = list(prompt), [], 0
    while len(tokens) < len(prompt) + length:
        logits, tapped_states = _forward(target, tokens, start, pages)
        taps.append(tapped_states)
        start = len(tokens)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in eos_ids:
            break
    return Text(torch.tensor(tokens, device=pages.device), torch.cat(taps), len(prompt))


def probe(
    checkpoint: DraftCheckpoint,
    candidates: Sequence[Reading],
    target: Target,
    texts: Sequence[Text],
    pages: Pages,
    dtype: torch.dtype,
) -> tuple[Probed, ...]:
    """Draft blocks under each reading, each from the target's own text, and count agreement.

    Args:
        checkpoint: the draft.
        candidates: `readings` of it.
        target: made with `tapped(candidates)` as its taps.
        texts: what it wrote; ten anchors are taken from them, in order.
        pages: of the target, and of the drafts in turn.
        dtype: the draft's.

    Raises:
        ValueError: the texts are too short for a single block.
    """
    columns = {tap: i for i, tap in enumerate(tapped(candidates))}
    width = texts[0].taps.shape[1] // len(columns)
    return tuple(
        Probed(
            reading,
            _accepted(
                make_drafter(
                    replace(checkpoint, slot_rule=reading.slot_rule),
                    reading.config,
                    target,
                    dtype=dtype,
                    device=pages.device,
                    num_pages=pages.num_pages,
                    page_size=pages.page_size,
                ),
                texts,
                torch.cat(
                    [
                        torch.arange(columns[tap] * width, (columns[tap] + 1) * width)
                        for tap in reading.config.taps
                    ]
                ).to(pages.device),
                pages,
            ),
        )
        for reading in candidates
    )


def _accepted(
    drafter: Drafter, texts: Sequence[Text], channels: Tensor, pages: Pages
) -> tuple[int, ...]:
    """Drafts in agreement with the text, for the first blocks of it."""
    counts = (
        count for text in texts for count in _blocks(drafter, text, text.taps[:, channels], pages)
    )
    first = tuple(islice(counts, BLOCKS))
    if not first:
        raise ValueError("the target's texts are too short to draft a block: use other prompts")
    return first


def _blocks(drafter: Drafter, text: Text, taps: Tensor, pages: Pages) -> Iterator[int]:
    seen, last = 0, len(text.tokens) - 1 - drafter.max_draft_tokens
    for anchor in range(text.num_prompt, last + 1, STRIDE):
        drafter.observe(_committed(text, taps, seen, anchor, pages))
        seen = anchor
        drafts = drafter.propose(_context(drafter, text, anchor, pages)).token_ids[0]
        truth = text.tokens[anchor + 1 : anchor + 1 + len(drafts)]
        yield int((drafts == truth).long().cumprod(0).sum())


def _committed(text: Text, taps: Tensor, start: int, end: int, pages: Pages) -> CommittedTokens:
    positions = torch.arange(start, end, device=pages.device)
    return CommittedTokens(
        lens=torch.tensor([end - start], device=pages.device),
        page_table=pages.table,
        token_ids=text.tokens[start:end],
        following_ids=text.tokens[start + 1 : end + 1],
        positions=positions,
        slot_mapping=pages.slots(positions),
        req_index=torch.zeros_like(positions),
        taps=taps[start:end],
    )


def _context(drafter: Drafter, text: Text, anchor: int, pages: Pages) -> DraftContext:
    zero = torch.zeros(1, dtype=torch.int64, device=pages.device)
    return DraftContext(
        num_drafts=drafter.max_draft_tokens,
        req_index=zero,
        anchors=text.tokens[anchor : anchor + 1],
        positions=zero + anchor,
        page_table=pages.table,
        history=text.tokens[None],
        temperatures=torch.zeros(1, device=pages.device),
        seeds=zero,
        purposes=zero + DRAFT_PURPOSE,
        need_logits=False,
        draws=KeyedDraws(),
    )


def _forward(target: Target, tokens: list[int], start: int, pages: Pages) -> tuple[Tensor, Tensor]:
    """Logits [V] after the last token, and taps [n, A], of the tokens from `start` on."""
    count, device = len(tokens) - start, pages.device
    positions = torch.arange(start, len(tokens), device=device)
    layout = TokenLayout.build(
        torch.tensor([count], device=device),
        torch.tensor([1], device=device),
        num_tokens=count,
        num_scored=1,
        kind="compact",
        width=1,
        row_granule=target.row_granule,
    )
    output = target.forward(
        ForwardBatch(
            layout=layout,
            token_ids=Tokens(torch.tensor(tokens[start:], device=device)),
            positions=Tokens(positions),
            slot_mapping=Tokens(pages.slots(positions)),
            page_table=pages.table,
            seq_lens=torch.tensor([len(tokens)], device=device),
        )
    )
    if output.taps is None:
        raise ValueError("the target returned no taps")
    return output.logits[0], output.taps
