"""Acceptance by real speculative decoding, without a cache: slow, short, and independent.

Each step drafts a block for every prompt, runs the target over whole sequences, accepts by the
exact rule, and counts. It measures acceptance only; nothing here says anything about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emberline.train.backbone import DraftModel
from emberline.train.blocks import dense_mask
from emberline.train.eagle3 import Eagle3Model
from emberline.train.frozen import TrainingTarget, target_logits
from emberline.train.model import Model

ROUND_TO = 64  # lengths are padded up, so that few shapes occur


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of one prompt's run."""

    emitted: int
    steps: int
    reached: tuple[int, ...]  # by slot: how often it was verified
    accepted: tuple[int, ...]  # by slot: how often it was accepted
    output_ids: tuple[int, ...]

    @property
    def length(self) -> float:
        """Acceptance length: emitted tokens per step, the verifier's own token included."""
        return self.emitted / max(1, self.steps)


class _Run:
    """Mutable state of one batch of prompts."""

    def __init__(self, prompts: Sequence[Sequence[int]], room: int, device: torch.device) -> None:
        longest = max(map(len, prompts))
        width = -(-(longest + room) // ROUND_TO) * ROUND_TO
        self.tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
        for index, prompt in enumerate(prompts):
            self.tokens[index, : len(prompt)] = torch.tensor(prompt)
        self.start = [len(prompt) for prompt in prompts]
        self.lens = list(self.start)  # committed tokens; the last one is the anchor
        self.steps = [0] * len(prompts)
        self.done = [False] * len(prompts)


@torch.no_grad()
def measure(
    target: TrainingTarget,
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    stop_ids: Sequence[int],
    seed: int = 0,
) -> list[Acceptance]:
    """Decode every prompt and count acceptance. Temperature 0 is greedy.

    Drafts of every algorithm: a block at once, or an EAGLE-3 chain of as many steps. A prompt of
    an EAGLE-3 draft has at least two tokens.
    """
    device, size = target.device, model.config.block_size
    taps_of = model.config.target_layer_ids
    generator = torch.Generator(device).manual_seed(seed)
    run = _Run(prompts, max_new_tokens + 2 * size, device)
    counts = torch.zeros(2, len(prompts), size, dtype=torch.int64)
    angles = model.angles(run.tokens.shape[1] + size)
    while not all(run.done):
        width = -(-(max(run.lens) + size) // ROUND_TO) * ROUND_TO
        tokens = run.tokens[:, :width]
        anchors = torch.tensor([n - 1 for n in run.lens], device=device)
        # The anchor's own taps are not known yet to the draft: the mask hides them.
        taps, _ = target.features(tokens, taps_of)
        drafts, q = draft_block(
            target, model, taps, tokens, anchors, temperature, generator, angles
        )
        at = anchors[:, None] + torch.arange(size, device=device)
        tokens.scatter_(1, at + 1, drafts)
        _, last = target.features(tokens, taps_of)
        window = torch.cat((at, at[:, -1:] + 1), dim=1)
        hidden = last.gather(1, window[..., None].expand(-1, -1, last.shape[-1]))
        logits = target_logits(target, hidden.flatten(0, 1)).view(*window.shape, -1)
        num_accepted, extra = accept(drafts, q, logits, temperature, generator)
        _commit(run, drafts, num_accepted, extra, counts, max_new_tokens, stop_ids)
    results = []
    for index, start in enumerate(run.start):
        ids = run.tokens[index, start : run.lens[index]].tolist()
        reached, accepted = (tuple(counts[side, index].tolist()) for side in (0, 1))
        results.append(Acceptance(len(ids), run.steps[index], reached, accepted, tuple(ids)))
    return results


def draft_block(
    target: TrainingTarget,
    model: Model,
    taps: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    temperature: float,
    generator: torch.Generator,
    angles: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Draft one block a sequence: ids [S, K], and q [S, K, V] unless greedy.

    Args:
        taps: [S, L, A]; tokens: [S, L] int64; anchors: [S] int64, where the blocks start.
        angles: rotary angles of at least L + K positions.
    """
    if isinstance(model, Eagle3Model):
        next_logits = _chain(target, model, taps, tokens, anchors, angles)
    else:
        next_logits = _block(target, model, taps, tokens, anchors, angles)
    previous = tokens.gather(1, anchors[:, None])[:, 0]
    ids, probs = [], []
    for _ in range(model.config.block_size):
        logits = next_logits(previous)
        if temperature > 0:
            q = torch.softmax(logits / temperature, dim=-1)
            probs.append(q)
            previous = _draw(q, generator)
        else:
            previous = logits.argmax(-1)
        ids.append(previous)
    return torch.stack(ids, dim=1), torch.stack(probs, dim=1) if probs else None


NextLogits = Callable[[Tensor], Tensor]
"""The token before a slot [S] -> the slot's logits [S, V]; called once for each slot in order."""


def _chain(
    target: TrainingTarget,
    model: Eagle3Model,
    taps: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    angles: Tensor,
) -> NextLogits:
    """The steps of an EAGLE-3 chain."""
    half = target.device.type == "cuda"
    with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
        chains = model.begin(taps, target.embedding[tokens], anchors[:, None], angles)

    def next_logits(previous: Tensor) -> Tensor:
        nonlocal chains
        with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
            hidden, chains = model.advance(chains, target.embedding[previous[:, None]])
        return target_logits(target, hidden[:, 0].to(target.dtype))

    return next_logits


def _block(
    target: TrainingTarget,
    model: DraftModel,
    taps: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    angles: Tensor,
) -> NextLogits:
    """The slots of a block, whose hidden states are computed at once."""
    size, mask_token_id = model.config.block_size, model.config.mask_token_id
    assert mask_token_id is not None
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    slots = torch.arange(size, device=tokens.device)
    inputs = torch.full((len(rows), size), mask_token_id, device=tokens.device)
    inputs[:, 0] = tokens[rows, anchors]
    mask = dense_mask(anchors[:, None], tokens.shape[1], size)
    half = target.device.type == "cuda"
    with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
        block = target.embedding[inputs]
        hidden = model(taps, block, anchors[:, None] + slots, angles, mask)
    base = target_logits(target, hidden.flatten(0, 1).to(target.dtype))
    by_slot = base.view(*inputs.shape, -1).unbind(1)
    waiting = iter(zip(by_slot, hidden.float().unbind(1), strict=True))
    state: Tensor | None = None

    def next_logits(previous: Tensor) -> Tensor:
        nonlocal state
        logits, at_slot = next(waiting)
        embedded = model.embed_previous(previous)
        if model.markov_head is None or embedded is None:
            return logits
        state = torch.zeros_like(embedded) if state is None else state
        state, latent = model.markov_head.advance(state, at_slot, embedded)
        bias: Tensor = model.markov_head.markov_w2(latent)
        return logits + bias

    return next_logits


def accept(
    drafts: Tensor,
    q: Tensor | None,
    logits: Tensor,
    temperature: float,
    generator: torch.Generator,
) -> tuple[list[int], list[int]]:
    """Accepted drafts and the token after them, by sequence (Leviathan et al. 2023).

    drafts [S, K]; q [S, K, V] or None when greedy; logits [S, K + 1, V] of the target.
    """
    size = drafts.shape[1]
    rows = torch.arange(drafts.shape[0], device=drafts.device)
    if q is None:
        choice = logits.argmax(-1)
        good = choice[:, :size] == drafts
        count = good.long().cumprod(1).sum(1)
        return count.tolist(), choice[rows, count].tolist()
    p = torch.softmax(logits / temperature, dim=-1)
    chosen = drafts[..., None]
    ratio = (p[:, :size].gather(2, chosen) / q.gather(2, chosen))[..., 0]
    coin = torch.rand(ratio.shape, generator=generator, device=ratio.device)
    count = (coin < ratio).long().cumprod(1).sum(1)
    rest = p[rows, count]
    rejected = (count < size)[:, None]
    proposal = q[rows, count.clamp(max=size - 1)]
    rest = torch.where(rejected, (rest - proposal).clamp(min=0), rest)
    return count.tolist(), _draw(rest, generator).tolist()


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One id a row in proportion to the weights, [S, V] -> [S]. An exponential race."""
    noise = torch.rand(weights.shape, generator=generator, device=weights.device)
    race = -torch.log(noise.clamp(1e-20, 1 - 1e-7)) / weights.clamp(min=1e-30)
    return race.argmin(-1)


def _commit(
    run: _Run,
    drafts: Tensor,
    num_accepted: list[int],
    extra: list[int],
    counts: Tensor,
    max_new_tokens: int,
    stop_ids: Sequence[int],
) -> None:
    proposed = drafts.tolist()
    for index, (accepted, last) in enumerate(zip(num_accepted, extra, strict=True)):
        if run.done[index]:
            continue
        emitted = [*proposed[index][:accepted], last]
        room = run.start[index] + max_new_tokens - run.lens[index]
        stops = [at for at, token in enumerate(emitted) if token in stop_ids]
        emitted = emitted[: min([room, *(at + 1 for at in stops)])]
        counts[0, index, : min(accepted + 1, len(proposed[index]))] += 1
        counts[1, index, :accepted] += 1
        begin = run.lens[index]
        run.tokens[index, begin:] = 0
        run.tokens[index, begin : begin + len(emitted)] = torch.tensor(emitted)
        run.lens[index] += len(emitted)
        run.steps[index] += 1
        run.done[index] = bool(stops) or len(emitted) >= room
