"""How many drafts of each block are verified.

Owns the policies. Must not know layouts, requests or models: a policy turns confidences and limits
into lengths.

Whatever the policy, the accept rules stay exact only if the admission of draft k depends neither on
the value of draft k nor on that of a later one. Given the drafts before k, the window then reaches
k or not independently of what draft k is, and the token emitted at k has the target's law
either way. (The confidence of draft k itself may be read: a drafter computes it before it draws k,
from the drafts before.)
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from emberline.batch import Admission, DraftProposal


class Planner(Protocol):
    """A policy of verification."""

    def admit(self, proposal: DraftProposal, limits: Tensor) -> Admission:
        """Choose how many leading drafts of each request to verify.

        Args:
            proposal: drafts of B requests with their confidences.
            limits: [B] int64, the most drafts each may verify, known to the host beforehand.
        """
        ...


class VerifyAll:
    """Verify every draft, within the limits.

    Does not look at the token it admits: it looks at no token and no confidence at all.
    """

    def admit(self, proposal: DraftProposal, limits: Tensor) -> Admission:
        """All that was drafted, up to the limit."""
        return _admission(torch.minimum(proposal.num_drafted, limits))


class Threshold:
    """Verify the longest prefix whose survival stays at or over a threshold.

    Survival of draft k is the product of the confidences up to k, so it only falls, and the prefix
    is the set of drafts over the threshold. A confidence that is NaN counts as 0: unknown is not
    worth verifying. A drafter without confidences has every draft verified.

    Does not look at the token it admits: whether k is in reads the confidences 0 .. k, and those
    were computed from the anchor and the drafts before k. Confidences after k cannot take it
    out again, because a prefix is ended by its first failure only.
    """

    def __init__(self, threshold: float) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must be in [0, 1], got {threshold}")
        self._threshold = threshold

    def admit(self, proposal: DraftProposal, limits: Tensor) -> Admission:
        """The prefix over the threshold, up to the limit."""
        bound = torch.minimum(proposal.num_drafted, limits)
        if proposal.confidence is None:
            return _admission(bound)
        survival = proposal.confidence.nan_to_num(0.0).cumprod(-1)
        prefix = (survival >= self._threshold).long().cumprod(-1).sum(-1)
        return _admission(torch.minimum(prefix, bound))


def _admission(num_admitted: Tensor) -> Admission:
    return Admission(num_admitted, int(num_admitted.sum()))
