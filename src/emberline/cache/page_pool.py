"""Which pages are free and who holds the others. Ids and counts only: no tensors, no tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PagePool:
    """Reference-counted page ids. Page 0 is scratch for padding and is never handed out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs scratch and at least one page, got {num_pages} pages")
        self.page_size = page_size
        self.num_pages = num_pages - 1
        # Last in, first out: memory that was touched before is used again first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._refs = [0] * num_pages  # by page; 0: it is free

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def num_refs(self, page: int) -> int:
        """References to a page; 0 if it is free."""
        return self._refs[page]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with one reference each; `MemoryError` if fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add one reference a page; somebody must hold it already."""
        for page in pages:
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is free: nobody can share it")
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference a page; the last one frees it."""
        for page in reversed(pages):
            if self._refs[page] < 1:
                raise ValueError(f"page {page} is released more often than it is held")
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise `RuntimeError` unless free + held = all, every reference accounted for."""
        expected = Counter(page for pages in held for page in pages)
        refs = {page: count for page, count in enumerate(self._refs) if count}
        if expected != refs or len(self._free) + len(refs) != self.num_pages:
            raise RuntimeError(
                f"page books do not balance: {len(self._free)} free, {len(refs)} referenced, "
                f"{len(expected)} held, {self.num_pages} in all"
            )
