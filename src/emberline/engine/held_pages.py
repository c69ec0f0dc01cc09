"""The pages of requests: what each has and shares, and what it still lacks.

Owns how a request's pages come and go. Must not know who runs, or when.
"""

from __future__ import annotations

from emberline.cache.radix import NO_PAGE, RadixCache
from emberline.engine.request_state import RequestState


class HeldPages:
    """What every request holds of a cache's pages.

    Args:
        cache: hands the pages out and keeps those of prefixes.
        at_once: most known tokens of a request in one step.
    """

    def __init__(self, cache: RadixCache, at_once: int) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._at_once = at_once

    def find_prefix(self, state: RequestState) -> None:
        """Take what the cache has of a request that does not run.

        At least one token must be left to compute, and no position whose logits are wanted may be
        skipped: prompt scores need those from the position before the first scored one on.
        """
        limit = len(state.token_ids) - 1
        if state.scores_prompt:
            limit = min(limit, first_scored(state))
        state.pages = self._cache.match(state.token_ids, limit)
        state.num_computed = len(state.pages) * self._pool.page_size

    def num_looked_up(self, state: RequestState) -> int:
        """Prompt tokens that could be found, were they cached: those that are scored never are."""
        if not self._cache.enabled:
            return 0
        return first_scored(state) if state.scores_prompt else state.num_prompt

    def to_come(self, state: RequestState) -> int:
        """Pages that a request still has to get for its tokens and the next one."""
        known = len(state.token_ids) + state.num_unread + state.ahead
        tokens = min(known + 1, state.length_limit)
        at_once = min(self._at_once, tokens - state.num_computed)
        num_held = len(state.pages) - state.pages.count(NO_PAGE)
        return max(0, self._cache.most_held(tokens, at_once) - num_held)

    def missing(self, state: RequestState, num_tokens: int) -> int:
        """Pages that the next `num_tokens` tokens of a request still lack."""
        return max(0, self._pool.pages_for(state.end_after(num_tokens)) - len(state.pages))

    def grow(self, state: RequestState, num_tokens: int) -> None:
        """Get the pages that its next `num_tokens` tokens lack."""
        state.pages += self._cache.allocate(self.missing(state, num_tokens))

    def are_ample(self, num_pages: int) -> bool:
        """Whether half of all pages are free once so many are taken."""
        return self._cache.num_available - num_pages >= self._pool.num_pages // 2

    def share(self, state: RequestState) -> None:
        """Give the cache a request's full pages of final tokens."""
        count = state.num_final // self._pool.page_size
        state.pages[:count] = self._cache.insert(state.token_ids, state.pages[:count])

    def trim(self, state: RequestState) -> None:
        """Let go of what a request's window has left behind, and of rejected drafts' pages."""
        end = self._pool.pages_for(max(len(state.token_ids), state.reach))
        self._cache.release(state.pages[end:])
        del state.pages[end:]
        first = min(self._cache.first_kept(state.num_final), len(state.pages))
        behind = [page for page in state.pages[:first] if page != NO_PAGE]
        if behind:
            self._cache.release(behind)
            state.pages[:first] = [NO_PAGE] * first

    def let_go(self, state: RequestState) -> None:
        """All of them."""
        self._cache.release(state.pages)
        state.pages = []
        state.num_computed = 0

    def private(self, state: RequestState) -> list[int]:
        """Pages that nobody else can read."""
        return [p for p in state.pages if p != NO_PAGE and self._pool.num_refs(p) == 1]


def first_scored(state: RequestState) -> int:
    """The first position of a scored prompt whose logits are wanted."""
    return max(state.params.prompt_logprobs_start, 1) - 1
