"""Prompt lookup: what it finds in a history, and what it must not draft."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from emberline.batch import DraftContext, DraftProposal
from emberline.drafters import ngram
from emberline.drafters.ngram import NGramDrafter
from emberline.sampling.keys import KeyedDraws


def propose(drafter: NGramDrafter, *histories: list[int]) -> DraftProposal:
    """One request a history; its last token is the anchor, what lies behind is stale."""
    num_reqs = len(histories)
    history = torch.full((num_reqs + 1, 40), 7, dtype=torch.int64)
    slots = [num_reqs - row for row in range(num_reqs)]
    for slot, tokens in zip(slots, histories, strict=True):
        history[slot, : len(tokens)] = torch.tensor(tokens)
    return drafter.propose(
        DraftContext(
            num_drafts=drafter.max_draft_tokens,
            req_index=torch.tensor(slots),
            anchors=torch.tensor([tokens[-1] for tokens in histories]),
            positions=torch.tensor([len(tokens) - 1 for tokens in histories]),
            page_table=torch.zeros(num_reqs, 1, dtype=torch.int64),
            history=history,
            temperatures=torch.ones(num_reqs),
            seeds=torch.zeros(num_reqs, dtype=torch.int64),
            purposes=torch.ones(num_reqs, dtype=torch.int64),
            need_logits=True,
            draws=KeyedDraws(),
        )
    )


def drafts(drafter: NGramDrafter, history: list[int]) -> list[int]:
    proposal = propose(drafter, history)
    return proposal.token_ids[0, : proposal.num_drafted[0]].tolist()


def naive(history: list[int], num_drafts: int, longest: int, shortest: int) -> list[int]:
    """The definition, spelled out."""
    for size in range(min(longest, len(history) - 1), shortest - 1, -1):
        for start in range(len(history) - size - 1, -1, -1):
            if history[start : start + size] == history[-size:]:
                return history[start + size : start + size + num_drafts]
    return []


def test_drafts_what_followed_the_suffix() -> None:
    assert drafts(NGramDrafter(3), [5, 1, 2, 3, 4, 9, 1, 2]) == [3, 4, 9]


def test_longer_match_beats_a_later_shorter_one() -> None:
    history = [1, 2, 3, 50, 2, 3, 60, 1, 2, 3]
    assert drafts(NGramDrafter(1, max_match=3), history) == [50]
    assert drafts(NGramDrafter(1, max_match=2), history) == [60]


def test_latest_of_equal_matches_wins() -> None:
    assert drafts(NGramDrafter(1, max_match=2), [1, 2, 50, 1, 2, 60, 1, 2]) == [60]


def test_too_short_a_match_is_no_evidence() -> None:
    history = [1, 2, 3, 1]
    assert drafts(NGramDrafter(4, min_match=2), history) == []
    assert drafts(NGramDrafter(4, min_match=1), history) == [2, 3, 1]


def test_runs_may_overlap_themselves() -> None:
    assert drafts(NGramDrafter(4, min_match=2), [8, 8, 8]) == [8]


@pytest.mark.parametrize("history", [[3], [3, 3], [3, 4]])
def test_histories_too_short_to_repeat(history: list[int]) -> None:
    assert drafts(NGramDrafter(4, min_match=2), history) == []


def test_never_reads_past_the_anchor() -> None:
    # Past the anchor the history row holds 7s, which would continue this one.
    assert drafts(NGramDrafter(8), [7, 7, 7, 1, 7, 7]) == [1, 7, 7]


def test_point_masses_row_by_row() -> None:
    proposal = propose(NGramDrafter(3), [1, 2, 3, 1, 2], [1, 2, 3, 4, 5], [9, 8, 7, 6, 9, 8])
    assert proposal.logits is None
    assert proposal.confidence is None
    assert proposal.num_drafted.tolist() == [3, 0, 3]
    assert proposal.token_ids.tolist() == [[3, 1, 2], [0, 0, 0], [7, 6, 9]]


def test_agrees_with_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        length = int(torch.randint(1, 40, (), generator=generator))
        history = torch.randint(0, 3, (length,), generator=generator).tolist()
        for shortest, longest in ((1, 1), (1, 4), (2, 3), (3, 6)):
            ours = drafts(NGramDrafter(5, max_match=longest, min_match=shortest), history)
            assert ours == naive(history, 5, longest, shortest)


@pytest.mark.parametrize(
    "arguments", [{"num_draft_tokens": 0}, {"min_match": 0}, {"min_match": 5, "max_match": 4}]
)
def test_refuses_settings_without_meaning(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"match|num_draft_tokens"):
        NGramDrafter(**arguments)


def test_the_guide_shows_this_very_code() -> None:
    root = Path(__file__).parents[2]
    guide = (root / "docs" / "add-a-drafter.md").read_text()
    source = Path(ngram.__file__).read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        assert block in source
