"""What a step is to do for a request: the entries that plans are lists of.

Must not know how a plan comes about, or what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from emberline.engine.request_state import RequestState


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step."""

    state: RequestState
    num_known: int  # tokens forwarded whose ids are known: a prompt chunk, or the anchor
    draft_limit: int  # most drafts that may follow them
    num_scored: int  # trailing known tokens that get logits
    samples: bool  # whether a token is emitted after the last of them
    decodes: bool = False  # whether the known token is its anchor, the last one emitted
