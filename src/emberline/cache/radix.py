"""Pages of computed tokens, found again by their tokens.

Owns which pages are cached, for how long, and what may be given up. Must not know tensors or
requests. One page holds target and draft KV of its tokens, so both come back together.

A radix tree whose edges are full pages of tokens: one node a page, the path from the root its
prefix. Nothing ever has to be split, and a page has one place. A page that a request holds has a
reference of its own in the pool, the tree's is one more: a lock is a count, and what only the tree
holds can go.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from emberline.cache.page_pool import PagePool

NO_PAGE = 0
"""In a list of pages: behind the window, nothing is kept there (the id is the scratch page's)."""


@dataclass(slots=True, eq=False)
class _Node:
    key: tuple[int, ...]  # its page of tokens
    parent: _Node | None
    page: int = NO_PAGE  # NO_PAGE: given up; what comes after it is still there
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    last_used: int = 0


class RadixCache:
    """The pool's pages, with those of finished and running requests kept for others.

    Args:
        pool: hands out the pages.
        lookahead: how many tokens past its own a page's KV may depend on (`KVSpec.lookahead`): a
            match is shortened by so many.
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
        self._num_idle = 0  # cached pages that nobody else holds
        self._leaves: list[tuple[int, int, _Node]] = []  # idle ones by last use; some are outdated
        self._clock = 0

    @property
    def num_idle(self) -> int:
        """Cached pages that no request holds."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free ones and idle cached ones."""
        return self.pool.num_free + self._num_idle

    def match(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Pages of the longest cached prefix of at most `limit` tokens, held for the caller.

        Returns:
            One entry a full page; `NO_PAGE` where a window no longer looks.
        """
        path = list(self._walk(token_ids[: limit + self.lookahead])) if limit > 0 else []
        size = self.pool.page_size
        count = self._usable(path, max(0, len(path) * size - self.lookahead) // size)
        first = self.first_needed(count * size)
        for node in path[:count]:
            node.last_used = self._tick()
        pages = [node.page for node in path[first:count]]
        self._retain(pages)
        return [NO_PAGE] * min(first, count) + pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Keep the pages of a prefix, all of whose tokens are computed.

        Args:
            token_ids: the sequence; its first `len(pages)` pages of tokens are kept.
            pages: held by the caller, `NO_PAGE` where it holds none.

        Returns:
            The caller's pages from now on: where the tree has other pages for the same tokens, the
            caller's hold moves to those, and its own are freed.
        """
        if not self.enabled:
            return list(pages)
        size, node, kept = self.pool.page_size, self._root, []
        for index, page in enumerate(pages):
            key = tuple(token_ids[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, node)
            if child.page == NO_PAGE and page != NO_PAGE:
                child.page = page
                self._nodes[page] = child
                self.pool.retain([page])
            elif page not in (child.page, NO_PAGE):
                self._retain([child.page])
                self.release([page])
                page = child.page
            child.last_used = self._tick()
            kept.append(page)
            node = child
        return kept

    def allocate(self, count: int) -> list[int]:
        """Hand out pages, giving up the least recently used idle ones if too few are free.

        Raises:
            MemoryError: fewer than `count` are available; nothing has been given up then.
        """
        if count > self.num_available:
            raise MemoryError(f"{count} pages wanted, {self.num_available} available")
        while self.pool.num_free < count:
            self._give_up(self._oldest())
        return self.pool.allocate(count)

    def release(self, pages: Sequence[int]) -> None:
        """Drop the caller's hold; what the tree keeps stays cached."""
        for page in reversed(pages):
            if page == NO_PAGE:
                continue
            self.pool.release([page])
            node = self._nodes.get(page)
            if node is not None and self.pool.num_refs(page) == 1:
                self._num_idle += 1
                node.last_used = self._tick()
                self._note_leaf(node)

    def first_needed(self, num_tokens: int) -> int:
        """The first page that the token at position `num_tokens` or a later one looks at."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.pool.page_size

    def clear(self) -> None:
        """Give up every idle page."""
        while self._num_idle:
            self._give_up(self._oldest())

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise `RuntimeError` unless free + cached + held = all, and the tree is whole."""
        cached = [node.page for node in self._all() if node.page != NO_PAGE]
        self.pool.check([*([p for p in pages if p != NO_PAGE] for pages in held), cached])
        idle = sum(self.pool.num_refs(page) == 1 for page in cached)
        if sorted(cached) != sorted(self._nodes) or idle != self._num_idle:
            raise RuntimeError(
                f"the prefix cache's books do not balance: {len(cached)} pages in the tree, "
                f"{len(self._nodes)} listed; {idle} idle, {self._num_idle} counted"
            )

    def _walk(self, token_ids: Sequence[int]) -> Iterator[_Node]:
        """The nodes along a sequence, as far as the tree goes."""
        size, node = self.pool.page_size, self._root
        for end in range(size, len(token_ids) + 1, size):
            child = node.children.get(tuple(token_ids[end - size : end]))
            if child is None:
                return
            yield child
            node = child

    def _usable(self, path: Sequence[_Node], count: int) -> int:
        """The most pages, up to `count`, after which all that a window needs is there."""
        if self.window is None:
            return count
        start, best = 0, 0  # of the unbroken run of pages
        for index in range(count):
            if path[index].page == NO_PAGE:
                start = index + 1
            if start <= self.first_needed((index + 1) * self.pool.page_size):
                best = index + 1
        return best

    def _retain(self, pages: Sequence[int]) -> None:
        self._num_idle -= sum(self.pool.num_refs(page) == 1 for page in pages)
        self.pool.retain(pages)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _note_leaf(self, node: _Node) -> None:
        """List an idle page that nothing follows. Later uses outdate the entry."""
        if node.children:
            return
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.last_used, node.page, node))

    def _is_current(self, entry: tuple[int, int, _Node]) -> bool:
        last_used, page, node = entry
        return (
            self._nodes.get(page) is node
            and node.last_used == last_used
            and not node.children
            and self.pool.num_refs(page) == 1
        )

    def _oldest(self) -> _Node:
        """The idle page to give up next: a leaf, or behind a window one that has successors.

        Without a window whoever holds a page holds all before it, so idle pages end in idle leaves.
        """
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_current(entry):
                return entry[2]
        idle = (node for page, node in self._nodes.items() if self.pool.num_refs(page) == 1)
        return min(idle, key=lambda node: node.last_used)

    def _give_up(self, node: _Node) -> None:
        """Free an idle page, and cut off what then leads to no page."""
        self._num_idle -= 1
        del self._nodes[node.page]
        self.pool.release([node.page])
        node.page = NO_PAGE
        while node.parent is not None and node.page == NO_PAGE and not node.children:
            parent = node.parent
            del parent.children[node.key]
            node = parent
        if node.page != NO_PAGE and self.pool.num_refs(node.page) == 1:
            self._note_leaf(node)

    def _all(self) -> Iterator[_Node]:
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            pending += node.children.values()
            yield node
