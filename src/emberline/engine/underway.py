"""Prefixes that are being computed just now: whoever needs the same had better wait for them.

Owns which requests those are. Must not know budgets or who runs next.
"""

from __future__ import annotations

from collections.abc import Iterable

from emberline.cache.radix import RadixCache
from emberline.engine.request_state import RequestState

_Page = tuple[int, ...]


class PrefixesUnderway:
    """The prompts of running requests that are not in the cache yet, found by their tokens.

    Args:
        cache: where they will be.
        running: requests that run. Good for as long as these neither end nor get any further.
    """

    def __init__(self, cache: RadixCache, running: Iterable[RequestState]) -> None:
        self._cache = cache
        self._states = [state for state in running if _will_be_shared(state)]
        self._by_page: dict[int, dict[_Page, list[RequestState]]] = {}  # by where that begins

    def add(self, state: RequestState) -> None:
        """Another request runs by now."""
        if _will_be_shared(state):
            self._states.append(state)
            for start, found in self._by_page.items():
                found.setdefault(self._page(state, start), []).append(state)

    def hold_most_of(self, state: RequestState) -> bool:
        """Whether most of what a request needs is just being computed for one that ranks before it.

        It is then cheaper to wait for that one's first token than to compute it twice; not for one
        that has more than twice as far to go.
        """
        if not self._cache.enabled or state.scores_prompt:
            return False
        start, size = state.num_computed, self._cache.pool.page_size
        wanted = start + max(size, (len(state.token_ids) - start) // 2)
        wanted = min(wanted, len(state.token_ids) - 1)  # the last token is never taken
        wanted -= wanted % size  # full pages only
        known = wanted + self._cache.lookahead  # what their KV depends on
        return wanted > start and any(
            other.rank < state.rank
            and other.num_pending <= 2 * state.num_pending
            and len(other.token_ids) >= wanted
            and other.token_ids[:known] == state.token_ids[:known]
            for other in self._alike(state, start)
        )

    def _alike(self, state: RequestState, start: int) -> list[RequestState]:
        """Those with the same page from `start` on: to compare with everybody takes too long."""
        if start not in self._by_page:
            found = self._by_page[start] = {}
            for other in self._states:
                found.setdefault(self._page(other, start), []).append(other)
        return self._by_page[start].get(self._page(state, start), [])

    def _page(self, state: RequestState, start: int) -> _Page:
        return tuple(state.token_ids[start : start + self._cache.pool.page_size])


def _will_be_shared(state: RequestState) -> bool:
    return not (state.shared or state.scores_prompt)
