"""Drafts that know a part of the target's tokens: q is what was drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emberline.models.weights import ModelError

from support.drafter_world import (
    HIDDEN,
    RANK,
    VOCAB,
    TinyTarget,
    load,
)
from support.tiny_dialects import (
    KNOWN,
    PLAIN,
    Tensors,
    reduced_tensors,
)
from support.tiny_draft import (
    DFLASH,
    draft_config,
    proposals,
)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_what_a_draft_does_not_know_is_never_drawn(tmp_path: Path, head: str | None) -> None:
    config = PLAIN if head else draft_config(**DFLASH)
    reduced = load(tmp_path / "reduced", config, reduced_tensors(head))
    ids, logits, _ = proposals(reduced)
    known = torch.tensor(KNOWN)
    assert set(ids.flatten().tolist()) <= set(KNOWN)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[known] = False
    assert logits[..., outside].isneginf().all()
    assert logits[..., known].isfinite().all()
    # The same numbers as a draft that knows all, whose rows of the others are anything.
    tensors = {n: t for n, t in reduced_tensors(head).items() if n not in ("d2t", "t2d")}
    full = torch.full((VOCAB, HIDDEN), 0.7)
    full[known] = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = full
    if head is not None:
        w2 = torch.full((VOCAB, RANK), 0.3)
        w2[known] = tensors["markov_head.markov_w2.weight"]
        tensors["markov_head.markov_w2.weight"] = w2
    whole = load(tmp_path / "whole", config, tensors)
    first = proposals(whole)[1][:, 0]
    assert torch.allclose(first[:, known], logits[:, 0, known], atol=1e-5)


def test_a_reduced_draft_may_leave_the_head_to_its_target(tmp_path: Path) -> None:
    tensors = reduced_tensors()
    tensors["lm_head.weight"] = TinyTarget().matrix[list(KNOWN)]
    own = load(tmp_path / "own", PLAIN, tensors)
    del tensors["lm_head.weight"]
    assert torch.equal(proposals(load(tmp_path / "left", PLAIN, tensors))[0], proposals(own)[0])


BAD_MAPS: dict[str, tuple[Tensors, str]] = {
    "beyond": ({"d2t": torch.full((8,), 40)}, "vocabulary has 40"),
    "twice": ({"d2t": -torch.arange(8), "t2d": torch.ones(VOCAB)}, "twice"),
    "t2d": ({"t2d": torch.ones(VOCAB)}, "t2d keeps 40"),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_maps_that_cannot_be_are_refused(tmp_path: Path, case: str) -> None:
    changes, reason = BAD_MAPS[case]
    with pytest.raises(ModelError, match=reason):
        load(tmp_path, PLAIN, {**reduced_tensors(), **changes})
