"""Pages of computed tokens, found again by their tokens.

Owns which pages are cached, for how long, and what may be given up. Must not know tensors or
requests. One page holds target and draft KV of its tokens, so both come back together.

A radix tree whose edges are full pages of tokens: one node a page, the path from the root its
prefix. Nothing ever has to be split, and a page has one place. A page that a request holds has a
reference of its own in the pool, the tree's is one more: a lock is a count, and what only the tree
holds can go.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from emberline.cache.page_pool import PagePool

NO_PAGE = 0
"""In a list of pages: behind the window, nothing is kept there (the id is the scratch page's)."""


@dataclass(slots=True, eq=False)
class _Node:
    key: tuple[int, ...]  # the tokens that its page's KV depends on, but for those of its parents
    parent: _Node | None
    page: int = NO_PAGE  # NO_PAGE: given up; what comes after it is still there
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class RadixCache:
    """The pool's pages, with those of finished and running requests kept for others.

    Args:
        pool: hands out the pages.
        lookahead: how many tokens past its own a page's KV may depend on (`KVSpec.lookahead`): a
            prefix is shared only where so many tokens after it are the same as well.
        window: tokens that any layer of target or draft looks back, itself included; None if some
            layer sees all. With a window, pages behind it need not be kept.
        enabled: False: nothing is ever found or kept.
    """

    def __init__(
        self, pool: PagePool, *, lookahead: int = 0, window: int | None = None, enabled: bool = True
    ) -> None:
        self.pool = pool
        self.lookahead = lookahead
        self.window = window
        self.enabled = enabled
        self._root = _Node((), None)
        self._nodes: dict[int, _Node] = {}  # by page
        # Cached pages that nobody else holds, longest idle first. A request lets go of its last
        # page first, so without a window a page never goes before those that follow it.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def _unmatched(self) -> int:
        """Tokens at a sequence's end that no match of it ever takes."""
        return max(1, self.lookahead)

    @property
    def num_idle(self) -> int:
        """Cached pages that no request holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free ones and idle cached ones."""
        return self.pool.num_free + len(self._idle)

    def match(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Pages of the longest cached prefix of at most `limit` tokens, held for the caller.

        Returns:
            One entry a full page; `NO_PAGE` where a window no longer looks.
        """
        path = list(self._walk(token_ids[: max(0, limit) + self.lookahead]))
        path = path[: self._usable(path)]
        first = self.first_needed(len(path) * self.pool.page_size)
        pages = [node.page for node in path[first:]]
        self._retain(pages)
        return [NO_PAGE] * first + pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Keep the pages of a prefix, all of whose tokens are computed.

        Args:
            token_ids: the sequence, with what is known after the prefix. A page whose lookahead is
                not known yet is not kept.
            pages: one a full page of tokens, held by the caller; `NO_PAGE` where it holds none.

        Returns:
            The caller's pages from now on: where the tree has other pages for the same tokens, the
            caller's hold moves to those, and its own are freed.
        """
        if not self.enabled:
            return list(pages)
        node, kept, added = self._root, list(pages), list[int]()
        for index, (key, page) in enumerate(zip(self._keys(token_ids), pages, strict=False)):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, node)
            if child.page == NO_PAGE and page != NO_PAGE:
                child.page = page
                self._nodes[page] = child
                added.append(page)
            elif page not in (child.page, NO_PAGE):
                self._retain([child.page])
                self.release([page])
                kept[index] = child.page
            node = child
        self.pool.retain(added)
        self._prune(node)
        return kept

    def allocate(self, count: int) -> list[int]:
        """Hand out pages, giving up those idle the longest if too few are free.

        Raises:
            MemoryError: fewer than `count` are available; nothing has been given up then.
        """
        if count > self.num_available:
            raise MemoryError(f"{count} pages wanted, {self.num_available} available")
        self._give_up(count - self.pool.num_free)
        return self.pool.allocate(count)

    def release(self, pages: Sequence[int]) -> None:
        """Drop the caller's hold; what the tree keeps stays cached."""
        held = [page for page in pages if page != NO_PAGE]
        self.pool.release(held)
        for page in reversed(held):
            if page in self._nodes and self.pool.num_refs(page) == 1:
                self._idle[page] = None

    def first_needed(self, num_tokens: int) -> int:
        """The first page that the token at position `num_tokens` or a later one looks at."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.pool.page_size

    def first_kept(self, num_tokens: int) -> int:
        """The first page that a sequence of `num_tokens` computed tokens still has a use for.

        Its next token may look at later ones only. But what is found again is a prefix of full
        pages, with a token left to compute and its lookahead known: that one's window begins up to
        a page earlier, and without it nothing would be found.
        """
        size = self.pool.page_size
        return self.first_needed(max(0, num_tokens - self._unmatched) // size * size)

    def most_held(self, num_tokens: int, at_once: int) -> int:
        """Most pages that a sequence of `num_tokens` holds in a step of `at_once` tokens."""
        pages = self.pool.pages_for(num_tokens)
        if self.window is None:
            return pages
        # What can be found again ends with a page; the step begins up to a page later.
        step = self.pool.pages_for(at_once + self._unmatched - 1)
        return min(pages, 1 + self.pool.pages_for(self.window - 1) + step)

    def longest(self, at_once: int) -> int:
        """Most tokens of a sequence that has all pages to itself, `at_once` of them a step."""
        if self.window is None or self.most_held(sys.maxsize, at_once) > self.pool.num_pages:
            return self.pool.capacity
        return sys.maxsize

    def clear(self) -> None:
        """Give up every idle page."""
        self._give_up(len(self._idle))

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise `RuntimeError` unless free + cached + held = all, and the tree is whole."""
        nodes = list(self._all())
        cached = [node.page for node in nodes if node.page != NO_PAGE]
        self.pool.check([*([p for p in pages if p != NO_PAGE] for pages in held), cached])
        idle = {page for page in cached if self.pool.num_refs(page) == 1}
        if sorted(cached) != sorted(self._nodes) or idle != set(self._idle):
            raise RuntimeError(
                f"the prefix cache's books do not balance: {len(cached)} pages in the tree, "
                f"{len(self._nodes)} listed; {len(idle)} idle, {len(self._idle)} listed"
            )
        if any(node.page == NO_PAGE and not node.children for node in nodes):
            raise RuntimeError("the prefix cache keeps a path that leads to no page")

    def _keys(self, token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """What names each full page of a sequence: its tokens and its lookahead."""
        size = self.pool.page_size
        for start in range(0, len(token_ids) - self.lookahead - size + 1, size):
            yield tuple(token_ids[start : start + size + self.lookahead])

    def _walk(self, token_ids: Sequence[int]) -> Iterator[_Node]:
        """The nodes along a sequence, as far as the tree goes."""
        node = self._root
        for key in self._keys(token_ids):
            child = node.children.get(key)
            if child is None:
                return
            yield child
            node = child

    def _usable(self, path: Sequence[_Node]) -> int:
        """The most pages after which all that a window needs is there."""
        start, best = 0, 0  # of the unbroken run of pages
        for index, node in enumerate(path):
            if node.page == NO_PAGE:
                start = index + 1
            if start <= self.first_needed((index + 1) * self.pool.page_size):
                best = index + 1
        return best

    def _retain(self, pages: Sequence[int]) -> None:
        self.pool.retain(pages)
        for page in pages:
            self._idle.pop(page, None)

    def _give_up(self, count: int) -> None:
        """Free so many pages, those that have been idle the longest."""
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        self.pool.release(pages[::-1])
        for page in pages:
            node = self._nodes.pop(page)
            node.page = NO_PAGE
            self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Cut off what leads to no page."""
        while node.parent is not None and node.page == NO_PAGE and not node.children:
            del node.parent.children[node.key]
            node = node.parent

    def _all(self) -> Iterator[_Node]:
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            pending += node.children.values()
            yield node
