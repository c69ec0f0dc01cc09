"""The pool's books: every page is free or held, and a mistake is an error, not a leak."""

from __future__ import annotations

import pytest

from emberline.cache.page_pool import PagePool


def test_allocate_release_and_the_scratch_page():
    pool = PagePool(5, 16)
    assert (pool.num_pages, pool.num_free, pool.capacity) == (4, 4, 64)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [1, 2, 3, 4]
    pool.check([first, second])
    pool.release(first)
    assert pool.num_free == 3
    assert pool.allocate(1) == [first[0]]  # touched before, used first


def test_too_much_is_refused_and_takes_nothing():
    pool = PagePool(4, 16)
    with pytest.raises(MemoryError):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_double_release_is_an_error():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(ValueError, match="more often than it is held"):
        pool.release(pages)


@pytest.mark.parametrize("held", [[], [[1]], [[1, 2], [2]], [[1, 2, 3]]])
def test_books_that_do_not_balance_are_an_error(held):
    pool = PagePool(4, 16)
    assert pool.allocate(2) == [1, 2]
    pool.check([[1, 2]])
    with pytest.raises(RuntimeError, match="do not balance"):
        pool.check(held)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens, pages):
    assert PagePool(4, 16).pages_for(tokens) == pages
