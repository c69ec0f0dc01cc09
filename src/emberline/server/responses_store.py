"""Responses that can be fetched, continued and deleted: kept in memory, within bounds.

Owns what is forgotten first. Must not know how a response is made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from emberline.server.responses_items import Item

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20
ITEM_BYTES = 512
"""Of an item besides its text: about what its objects take."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the conversation up to its end."""

    id: str
    body: bytes  # the response as it was answered
    items: tuple[Item, ...]  # instructions left out
    has_logprobs: bool = False

    @property
    def num_bytes(self) -> int:
        """About what it takes; items that several responses share count for each of them."""
        texts = sum(ITEM_BYTES + len(item.model_dump_json().encode()) for item in self.items)
        return len(self.body) + texts


class ResponseStore:
    """The latest used responses. Safe to use from several threads.

    Args:
        max_responses: most responses that are kept.
        max_bytes: most bytes that they take together; one that alone takes more is not kept.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """What all of them take."""
        return self._num_bytes

    def put(self, response: StoredResponse) -> None:
        """Keep a response, and forget those that have not been used for longest."""
        size = response.num_bytes
        if size > self._max_bytes:
            return
        with self._lock:
            self._forget(response.id)
            self._kept[response.id] = (response, size)
            self._num_bytes += size
            while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, which counts as used; None if it is not (or no longer) kept."""
        with self._lock:
            if response_id not in self._kept:
                return None
            self._kept.move_to_end(response_id)
            return self._kept[response_id][0]

    def delete(self, response_id: str) -> None:
        """Forget a response, if it is kept."""
        with self._lock:
            self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        _, size = self._kept.pop(response_id, (None, 0))
        self._num_bytes -= size
