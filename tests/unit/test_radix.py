"""The prefix cache: plain cases, and any order of uses against a model of what every page holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emberline.cache.page_pool import PagePool
from emberline.cache.radix import NO_PAGE, RadixCache

SIZE = 4


def make(num_pages: int = 16, **options: object) -> RadixCache:
    return RadixCache(PagePool(num_pages + 1, SIZE), **options)  # type: ignore[arg-type]


def hold(cache: RadixCache, tokens: list[int]) -> list[int]:
    """What a request does whose prompt this is: take what is there, compute and share the rest."""
    pages = cache.match(tokens, len(tokens) - 1)
    pages += cache.allocate(len(tokens) // SIZE - len(pages))
    return cache.insert(tokens, pages)


def keep(cache: RadixCache, tokens: list[int]) -> list[int]:
    """The same by a request that has ended: its pages, which only the cache holds."""
    pages = hold(cache, tokens)
    cache.release(pages)
    return pages


def found(cache: RadixCache, tokens: list[int], limit: int | None = None) -> list[int]:
    """What a match finds, without staying on it."""
    pages = cache.match(tokens, len(tokens) if limit is None else limit)
    cache.release(pages)
    return pages


A = list(range(100, 112))  # three pages
B = list(range(200, 212))
C = list(range(300, 312))


def test_an_empty_cache_finds_nothing():
    cache = make()
    for limit in (-1, 0, 4, 12):
        assert cache.match(A, limit) == []
    cache.check([])


@pytest.mark.parametrize("limit", range(-1, 14))
def test_a_match_is_of_full_pages_within_its_limit(limit):
    cache = make()
    pages = keep(cache, A)
    assert found(cache, A, limit) == pages[: max(0, min(limit, 12)) // SIZE]


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
@pytest.mark.parametrize("num_same", range(14))
def test_a_match_is_shortened_by_the_lookahead(lookahead, num_same):
    """A page is shared only if the tokens that its KV looks ahead to are the same too."""
    cache = make(lookahead=lookahead)
    first = [*A, 1, 2]
    kept = len(first) - lookahead
    pages = cache.allocate(3)
    pages = cache.insert(first, pages)
    other = [*first[:num_same], *range(50, 64 - num_same)]
    expected = max(0, min(num_same, len(first)) - lookahead) // SIZE
    assert found(cache, other) == pages[: min(expected, kept // SIZE)]
    assert found(cache, other, 7) == pages[: min(expected, 1)]  # the limit is of tokens taken
    cache.check([pages])


def test_a_page_is_not_shared_with_whom_its_lookahead_differs():
    """KV that saw another next token is not this request's, even if the page's own tokens are."""
    cache = make(lookahead=1)
    own = keep(cache, [*A, 1])
    other = hold(cache, [*A, 2, *B])
    assert other[:2] == own[:2]
    assert other[2] != own[2]
    assert found(cache, [*A, 1]) == own
    assert found(cache, [*A, 2]) == other[:3]
    cache.release(other)
    cache.check([])


def test_a_page_whose_lookahead_is_not_known_yet_is_not_kept():
    cache = make(lookahead=1)
    pages = cache.allocate(3)
    assert cache.insert(A, pages) == pages
    cache.release(pages)
    assert (cache.num_idle, cache.pool.num_free) == (2, 14)
    assert found(cache, [*A, 1]) == pages[:2]


def test_the_longest_idle_go_first_and_of_them_the_last_page():
    cache = make(9)
    a, b, c = keep(cache, A), keep(cache, B), keep(cache, C)
    found(cache, A)  # used again
    gone = []
    for _ in range(9):
        before = {page for pages in (a, b, c) for page in pages} - set(gone)
        cache.allocate(1)
        left = {page for pages in (found(cache, t) for t in (B, C, A)) for page in pages}
        (page,) = before - left
        gone.append(page)
        if len(gone) == 6:
            break
        # `found` has used all of them again, in the same order: B, C, A.
    assert gone == [*reversed(b), *reversed(c)]
    assert found(cache, A) == a


def test_what_is_held_is_never_given_up():
    cache = make(6)
    held = hold(cache, A)
    idle = keep(cache, B)
    assert (cache.num_available, cache.num_idle) == (3, 3)
    with pytest.raises(MemoryError, match="4 pages wanted, 3 available"):
        cache.allocate(4)
    assert found(cache, B) == idle  # nothing was given up for it
    taken = cache.allocate(3)
    assert sorted(taken) == sorted(idle)
    assert found(cache, B) == []
    assert found(cache, A) == held
    cache.check([held, taken])


def test_a_page_that_two_hold_is_idle_when_both_are_gone():
    cache = make()
    first = hold(cache, A)
    second = cache.match(A, 8)
    assert second == first[:2]
    cache.release(first)
    assert cache.num_idle == 1
    cache.release(second)
    assert cache.num_idle == 3
    cache.check([])


def test_pages_of_the_same_tokens_are_kept_once():
    """Two compute the same at once: the second one's hold moves to the first one's pages."""
    cache = make()
    first, second = cache.allocate(3), cache.allocate(4)
    assert cache.insert(A, first) == first
    assert cache.insert([*A, *B], second) == [*first, second[3]]
    assert cache.pool.num_free == 16 - 4
    cache.check([first, [*first, second[3]]])
    cache.release(first)
    assert cache.num_idle == 0
    cache.release([*first, second[3]])
    assert cache.num_idle == 4
    cache.check([])


def test_keeping_again_changes_nothing():
    cache = make()
    pages = hold(cache, A)
    assert cache.insert(A, pages) == pages
    cache.check([pages])


def test_a_branch_shares_its_stem():
    cache = make()
    stem = keep(cache, A)
    left, right = keep(cache, [*A, *B]), keep(cache, [*A, *C])
    assert left[:3] == right[:3] == stem
    assert left[3:] != right[3:]
    assert cache.num_idle == 9
    assert found(cache, [*A[:8], *B]) == stem[:2]


@pytest.mark.parametrize(
    ("window", "num_tokens", "first"),
    [(1, 8, 2), (2, 8, 1), (4, 8, 1), (5, 8, 1), (6, 8, 0), (9, 8, 0), (5, 7, 0), (None, 99, 0)],
)
def test_first_page_that_a_window_needs(window, num_tokens, first):
    assert make(window=window).first_needed(num_tokens) == first


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("window", [2, 3, 4, 5, 8, 9, 13, 40])
def test_what_is_kept_behind_a_window_is_found_again(window, lookahead):
    """Wherever the sequence ends: its last token, and what has no lookahead yet, are not."""
    for count in range(1, 40):
        cache = make(window=window, lookahead=lookahead)
        tokens = list(range(count + lookahead))
        pages = cache.allocate(cache.pool.pages_for(count))
        first = min(cache.first_kept(count), len(pages))
        cache.release(pages[:first])
        pages[:first] = [NO_PAGE] * first
        cache.insert(tokens, pages[: count // SIZE])
        cache.release(pages)
        longest = (count - max(1, lookahead)) // SIZE
        assert len(found(cache, tokens[:count], count - 1)) == max(0, longest)


@pytest.mark.parametrize("window", [2, 4, 5, 6, 9, 13, 40])
def test_a_match_needs_its_whole_window_and_no_more(window):
    cache = make(window=window)
    tokens = [*A, *B]
    pages = keep(cache, tokens)
    count = len(pages)
    first = cache.first_needed(24)
    assert found(cache, tokens) == [NO_PAGE] * first + pages[first:]
    for gone in range(count):
        cache = make(window=window)
        pages = cache.allocate(count)
        pages[gone : gone + 1], lost = [NO_PAGE], pages[gone]
        cache.release([lost])
        cache.insert(tokens, pages)
        # The most pages whose window does not reach the missing one.
        usable = (n for n in range(count + 1) if not cache.first_needed(n * SIZE) <= gone < n)
        assert len(found(cache, tokens)) == max(usable)
        cache.check([pages])


def test_pages_behind_a_window_go_first_and_leave_the_rest_usable():
    cache = make(6, window=9)
    tokens = [*A, *B]
    pages = hold(cache, tokens)
    behind, needed = pages[:4], pages[4:]
    cache.release(behind)
    cache.release(needed)
    assert sorted(cache.allocate(4)) == sorted(behind)
    assert found(cache, tokens) == [NO_PAGE] * 4 + needed
    assert found(cache, tokens[:20]) == []  # its window is gone
    cache.allocate(1)  # the last page: it was let go before the one in front of it
    assert found(cache, tokens) == []
    cache.check([[*behind, needed[1]]])


def test_a_page_given_up_behind_a_window_comes_back_when_it_is_computed_again():
    cache = make(6, window=9)
    tokens = [*A, *B]
    pages = hold(cache, tokens)
    cache.release(pages[:4])
    taken = cache.allocate(4)
    cache.release(taken)
    again = cache.insert(tokens[:16], cache.allocate(4))
    assert found(cache, tokens[:16], 15) == [NO_PAGE, again[1], again[2]]
    cache.check([pages[4:], again])


@pytest.mark.parametrize("window", [1, 4])
def test_a_path_that_leads_to_no_page_is_not_kept(window):
    cache = make(4, window=window)
    assert cache.insert(A, [NO_PAGE] * 3) == [NO_PAGE] * 3
    cache.check([])
    pages = cache.insert(A, [NO_PAGE, *cache.allocate(1), NO_PAGE])
    cache.check([pages])
    cache.release(pages)
    assert cache.num_idle == 1
    cache.clear()
    cache.check([])
    assert cache.pool.num_free == 4


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 17])
@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_most_held_is_what_any_step_may_hold(window, at_once, lookahead):
    cache = make(64, window=window, lookahead=lookahead)
    for num_tokens in range(1, 60):
        spans = [
            cache.pool.pages_for(min(start + at_once, num_tokens)) - cache.first_kept(start)
            for start in range(num_tokens)
        ]
        if window is None:
            assert cache.most_held(num_tokens, at_once) == cache.pool.pages_for(num_tokens)
        else:
            # Never less than any step needs; as much once every place in a page has come up.
            assert max(spans) <= cache.most_held(num_tokens, at_once)
            if num_tokens > window + at_once + lookahead + 2 * SIZE:
                assert max(spans) == cache.most_held(num_tokens, at_once)


def test_a_window_that_fits_bounds_no_length():
    assert make(8).longest(at_once=4) == 32
    assert make(8, window=9).longest(at_once=4) > 1 << 40
    assert make(3, window=9).longest(at_once=4) == 12


def test_a_disabled_cache_keeps_nothing():
    cache = make(enabled=False)
    pages = hold(cache, A)
    assert found(cache, A) == []
    cache.check([pages])
    cache.release(pages)
    assert (cache.num_idle, cache.pool.num_free) == (0, 16)


def test_clear_gives_up_all_but_what_is_held():
    cache = make()
    held = hold(cache, A)
    keep(cache, [*A, *B])
    keep(cache, C)
    cache.clear()
    assert (cache.num_idle, cache.pool.num_free) == (0, 13)
    assert found(cache, C) == []
    assert found(cache, [*A, *B]) == held
    cache.check([held])


def test_check_sees_books_that_are_wrong():
    cache = make()
    held, idle = hold(cache, A), keep(cache, B)
    cache.check([held])
    for wrong in ([], [held, held], [held, idle], [held[:2]]):
        with pytest.raises(RuntimeError, match="do not balance"):
            cache.check(wrong)
    cache._idle.popitem()
    with pytest.raises(RuntimeError, match="prefix cache's books do not balance"):
        cache.check([held])


@dataclass
class Model:
    """A request as the cache's user sees it: tokens, how far they are computed, pages."""

    tokens: list[int]
    pages: list[int]
    num_computed: int


class AnyUse(RuleBasedStateMachine):
    """Requests that match, compute, share and end in any order.

    `content` says what was written to each page: the tokens up to its end and its lookahead, of
    which its KV is a function. A page with another content than its holder's tokens, or one that
    changes while it is held, is a wrong answer.
    """

    @initialize(
        lookahead=st.integers(0, 2),
        window=st.none() | st.integers(2, 14),
        num_pages=st.integers(4, 24),
        enabled=st.sampled_from([True] * 9 + [False]),
    )
    def begin(self, lookahead, window, num_pages, enabled):
        self.cache = make(num_pages, lookahead=lookahead, window=window, enabled=enabled)
        self.content: dict[int, tuple[int, ...]] = {}
        self.kept: dict[tuple[int, ...], int] = {}  # what a page was kept for -> the page
        self.requests: list[Model] = []
        self.sequences: list[list[int]] = []

    def key(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[: (index + 1) * SIZE + self.cache.lookahead])

    def still_kept(self, key: tuple[int, ...]) -> int | None:
        """The page that the tree has for a key, told from references alone."""
        page = self.kept.get(key)
        holders = sum(page in r.pages for r in self.requests)
        if page is None or self.cache.pool.num_refs(page) == holders:
            return None
        return page if self.content.get(page) == key else None

    def compute(self, request: Model, end: int) -> bool:
        """Compute tokens up to `end`, or give the request up if there are no pages for it."""
        missing = self.cache.pool.pages_for(end) - len(request.pages)
        if missing > self.cache.num_available:
            with pytest.raises(MemoryError):
                self.cache.allocate(missing)
            self.end(request, share=False)
            return False
        request.pages += self.cache.allocate(max(0, missing))
        for position in range(request.num_computed, end):
            page = request.pages[position // SIZE]
            assert page != NO_PAGE
            assert self.cache.pool.num_refs(page) == 1, "a page that others see is written to"
            self.content[page] = (-1, position)  # half a page is nobody else's
        for index in range(request.num_computed // SIZE, end // SIZE):
            self.content[request.pages[index]] = self.key(request.tokens, index)
        request.num_computed = max(request.num_computed, end)
        return True

    def share(self, request: Model) -> None:
        count = request.num_computed // SIZE
        request.pages[:count] = self.cache.insert(request.tokens, request.pages[:count])
        for index, page in enumerate(request.pages[:count]):
            if page != NO_PAGE and self.cache.enabled:
                self.kept[self.key(request.tokens, index)] = page

    def end(self, request: Model, share: bool) -> None:
        if share:
            self.share(request)
        self.requests.remove(request)
        self.cache.release(request.pages)

    @rule(
        like=st.integers(1, 4),
        num_same=st.integers(0, 30),
        tail=st.lists(st.integers(0, 1), min_size=3, max_size=12),
        back=st.sampled_from([0, 0, 1, 5]),
        share=st.booleans(),
    )
    def start(self, like, num_same, tail, back, share):
        """One that begins like an earlier one."""
        cache = self.cache
        tokens = [*(self.sequences[-like:] or [[]])[0][:num_same], *tail]
        self.sequences.append(tokens)
        limit = len(tokens) - 1 - back
        reach = [self.still_kept(self.key(tokens, i)) for i in range(len(tokens) // SIZE)]
        pages = cache.match(tokens, limit)
        # Never more than asked for, and all that a later token looks at.
        first = cache.first_needed(len(pages) * SIZE)
        assert len(pages) * SIZE <= max(0, limit)
        assert [page == NO_PAGE for page in pages] == [i < first for i in range(len(pages))]
        for index, page in enumerate(pages[first:], first):
            assert self.content[page] == self.key(tokens, index)
        # Nothing longer was to be had.
        for count in range(len(pages) + 1, max(0, limit) // SIZE + 1):
            whole = len(self.key(tokens, count - 1)) == count * SIZE + cache.lookahead
            needed = reach[cache.first_needed(count * SIZE) : count]
            assert not whole or None in needed
        request = Model(tokens, pages, len(pages) * SIZE)
        self.requests.append(request)
        self.go_on(request, share)

    def go_on(self, request: Model, share: bool) -> None:
        """Compute what is known, and let go of what lies behind the window."""
        if self.compute(request, max(0, len(request.tokens) - self.cache.lookahead)):
            if share:
                self.share(request)
            first = min(self.cache.first_kept(request.num_computed), len(request.pages))
            self.cache.release(request.pages[:first])
            request.pages[:first] = [NO_PAGE] * first

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def extend(self, data, more):
        request = data.draw(st.sampled_from(self.requests))
        request.tokens += more
        self.go_on(request, share=False)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share_one(self, data):
        self.share(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), share=st.booleans())
    def end_one(self, data, share):
        self.end(data.draw(st.sampled_from(self.requests)), share)

    @rule()
    def clear(self):
        self.cache.clear()
        assert self.cache.num_idle == 0

    @invariant()
    def holds(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check(r.pages for r in self.requests)
        held = {page for r in self.requests for page in r.pages} - {NO_PAGE}
        assert cache.num_available == cache.pool.num_pages - len(held)
        for request in self.requests:
            for index, page in enumerate(request.pages[: request.num_computed // SIZE]):
                if page != NO_PAGE:
                    assert self.content[page] == self.key(request.tokens, index)
        if cache.window is None:
            assert all(node.page != NO_PAGE for node in cache._all()), "a gap that nobody jumps"

    def teardown(self):
        if hasattr(self, "cache"):
            for request in list(self.requests):
                self.end(request, share=True)
            self.cache.check([])
            self.cache.clear()
            assert self.cache.pool.num_free == self.cache.pool.num_pages


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
