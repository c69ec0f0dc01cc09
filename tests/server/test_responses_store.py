"""What is kept of responses stays within its bounds, and the least used goes first."""

from __future__ import annotations

import pytest

from emberline.server.responses_items import Item, MessageItem
from emberline.server.responses_store import ResponseStore, StoredResponse


def stored(name: str, size: int = 100, items: tuple[Item, ...] = ()) -> StoredResponse:
    return StoredResponse(name, b"x" * size, items)


def names(store: ResponseStore) -> set[str]:
    return {name for name in "abcdef" if store.get(name) is not None}


def test_the_least_used_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    for name in "ab":
        store.put(stored(name))
    assert store.get("a") is not None
    store.put(stored("c"))
    assert store.get("b") is None
    assert names(store) == {"a", "c"}


@pytest.mark.parametrize("size", [100, 150, 250, 301])
def test_bytes_are_bounded(size: int) -> None:
    store = ResponseStore(max_bytes=500)
    for name in "abcdef":
        store.put(stored(name, size))
        assert store.num_bytes <= 500
        assert store.get(name) is not None
    assert len(store) == 500 // size


def test_what_is_too_large_for_all_of_it_is_not_kept() -> None:
    store = ResponseStore(max_bytes=500)
    store.put(stored("a"))
    store.put(stored("b", 501))
    assert names(store) == {"a"}


def test_the_books_balance() -> None:
    store = ResponseStore()
    long = MessageItem(role="user", content="é" * 1000)
    store.put(stored("a", items=(long,)))
    assert store.num_bytes > 2000
    store.put(stored("a", 10))
    assert (len(store), store.num_bytes) == (1, 10)
    store.delete("a")
    store.delete("a")
    assert (len(store), store.num_bytes) == (0, 0)
