"""Four requests of different lengths, and what a drafter on its own is told of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, DrawKeys, KVSpec, Purpose
from emberline.drafters import Drafter
from emberline.drafters.checkpoint import load_drafter
from emberline.ops.kernels import Kernels
from emberline.sampling.keys import KeyedDraws

VOCAB, HIDDEN, RANK, BLOCK, TARGET_LAYERS = 40, 32, 8, 5, 4
HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS = 4, 2, 8, 48, 2
TAPS = (-1, 1, 3)
PAGE_SIZE, PAGES_PER_REQ = 16, 10
LENGTHS = (3, 21, 140, 1)  # tokens before the anchor; one neighbour needs a second key window


class TinyTarget:
    """The target protocol's shared parts, random weights."""

    vocab_size, hidden_size = VOCAB, HIDDEN
    max_model_len = PAGE_SIZE * PAGES_PER_REQ
    kv_spec = KVSpec(TARGET_LAYERS, KV_HEADS, HEAD_DIM)
    row_granule = 8

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.matrix = torch.randn(VOCAB, HIDDEN, generator=generator)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float() @ self.matrix.T


def load(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    target: TinyTarget | None = None,
    num_draft_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    temperatures: tuple[float, ...] | None = None,
    kernels: Kernels | None = None,
) -> Drafter:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return load_drafter(
        folder,
        target or TinyTarget(),
        dtype=dtype,
        device="cpu",
        num_pages=1 + len(LENGTHS) * PAGES_PER_REQ,
        page_size=PAGE_SIZE,
        num_draft_tokens=num_draft_tokens,
        confidence_temperatures=temperatures,
        kernels=kernels,
    )


@dataclass
class RecordingDraws:
    """The engine's draws, remembering what each was made from."""

    inner: KeyedDraws
    seen: list[tuple[torch.Tensor, DrawKeys, torch.Tensor]]

    def categorical(self, logits: torch.Tensor, keys: DrawKeys) -> torch.Tensor:
        ids = self.inner.categorical(logits, keys)
        self.seen.append((logits.clone(), keys, ids.clone()))
        return ids

    def proportional(self, weights: torch.Tensor, keys: DrawKeys) -> torch.Tensor:
        raise AssertionError("a drafter draws through `draw`")

    def coin(self, probs: torch.Tensor, keys: DrawKeys) -> torch.Tensor:
        raise AssertionError("a drafter accepts nothing")


class World:
    """Four requests of different length with all they have committed, in shuffled pages."""

    def __init__(self, drafter: Drafter, page_seed: int = 0) -> None:
        self.drafter = drafter
        num_pages = len(LENGTHS) * PAGES_PER_REQ
        shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_seed))
        self.page_table = (shuffled + 1).view(len(LENGTHS), PAGES_PER_REQ)
        generator = torch.Generator().manual_seed(3)
        shape = (len(LENGTHS), PAGE_SIZE * PAGES_PER_REQ)
        self.tokens = torch.randint(0, VOCAB, shape, generator=generator)
        self.taps = torch.randn(*shape, len(TAPS) * HIDDEN, generator=generator)
        self.draws = RecordingDraws(KeyedDraws(), [])

    def observe(self, req: int, start: int, end: int, taps: torch.Tensor | None = None) -> None:
        positions = torch.arange(start, end)
        pages = self.page_table[req, positions // PAGE_SIZE]
        self.drafter.observe(
            CommittedTokens(
                lens=torch.tensor([end - start]),
                page_table=self.page_table[req][None],
                token_ids=self.tokens[req, start:end],
                following_ids=self.tokens[req, start + 1 : end + 1],
                positions=positions,
                slot_mapping=pages * PAGE_SIZE + positions % PAGE_SIZE,
                req_index=torch.full((end - start,), req),
                taps=(self.taps[req, start:end] if taps is None else taps)
                if self.drafter.taps
                else None,
            )
        )

    def observe_all(self, chunk: int = 1000) -> World:
        for req, length in enumerate(LENGTHS):
            for start in range(0, length, chunk):
                self.observe(req, start, min(start + chunk, length))
        return self

    def observe_together(self) -> None:
        """Everything of every request in one step."""
        lens = torch.tensor(LENGTHS)
        req = torch.repeat_interleave(torch.arange(len(LENGTHS)), lens)
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        pages = self.page_table[req, positions // PAGE_SIZE]
        self.drafter.observe(
            CommittedTokens(
                lens=lens,
                page_table=self.page_table,
                token_ids=self.tokens[req, positions],
                following_ids=self.tokens[req, positions + 1],
                positions=positions,
                slot_mapping=pages * PAGE_SIZE + positions % PAGE_SIZE,
                req_index=req,
                taps=self.taps[req, positions] if self.drafter.taps else None,
            )
        )

    def context(self, reqs: list[int], temperatures: list[float], **changes: Any) -> DraftContext:
        index = torch.tensor(reqs)
        lengths = torch.tensor(LENGTHS)[index]
        context = DraftContext(
            num_drafts=self.drafter.max_draft_tokens,
            req_index=index,
            anchors=self.tokens[index, lengths],
            positions=lengths,
            page_table=self.page_table[index],
            history=self.tokens,
            temperatures=torch.tensor(temperatures),
            seeds=index * 1000 + 17,
            purposes=torch.where(index % 2 == 1, int(Purpose.TARGET), int(Purpose.DRAFT)),
            need_logits=True,
            draws=self.draws,
        )
        return replace(context, **changes)

    def propose(self, reqs: list[int], temperatures: list[float], **changes: Any) -> DraftProposal:
        with torch.inference_mode():
            return self.drafter.propose(self.context(reqs, temperatures, **changes))
