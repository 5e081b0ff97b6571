"""One sequence: its length and its page table."""

from __future__ import annotations

from questkv.pages.pool import PagePool


class Sequence:
    """A list of physical pages and how many tokens they hold.

    The table has exactly the pages that `length` tokens need. Pages may be shared with other sequences; only
    `SequenceBatch.reserve` makes them writable, by copying a shared page first.

    Where sealed pages move, a step puts the closed page in the plain one's place at once. The pages that a step
    took out of the table stay held until it ends: its own tokens read them, and undoing it puts them back.

    Args:
        pool: Where the pages come from.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.table: list[int] = []
        self.length = 0
        # What stood at a logical page since the step under way began, oldest first.
        self._before: dict[int, list[int]] = {}

    @property
    def sealed_pages(self) -> int:
        """Pages that are full and have a token behind them; the last page is open and has no box."""
        return max(self.length - 1, 0) // self.pool.geometry.page_size

    @property
    def written_table(self) -> list[int]:
        """The table with the plain pages that the step under way writes, where `table` has what they move into."""
        return [
            self._before[logical][-1] if logical in self._before and self.pool.is_closed(page) else page
            for logical, page in enumerate(self.table)
        ]

    @property
    def replaced(self) -> list[int]:
        """Pages that the step under way took out of the table; the sequence still holds them."""
        return [page for pages in self._before.values() for page in pages]

    def replace(self, logical: int, page: int) -> None:
        """Put another page into the table until the step under way ends, and for good if it is settled."""
        self._before.setdefault(logical, []).append(self.table[logical])
        self.table[logical] = page

    def settle(self) -> None:
        """End a step: give back the pages that it took out of the table."""
        self.pool.release(self.replaced)
        self._before.clear()

    def restore(self) -> None:
        """Put back what `replace` took out of the table."""
        for logical, pages in self._before.items():
            self.pool.release([self.table[logical], *pages[1:]])
            self.table[logical] = pages[0]
        self._before.clear()

    def fork(self) -> Sequence:
        """A second sequence with the same tokens, sharing every page; no step is under way."""
        assert not self._before, "a step is settled before a sequence is forked"
        other = Sequence(self.pool)
        other.table = list(self.table)
        other.length = self.length
        self.pool.share(self.table)
        return other

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens; a sealed page that becomes the last one is open again.

        Raises:
            ValueError: The sequence has fewer tokens.
        """
        if not 0 <= tokens <= self.length:
            raise ValueError(f"[crop] tokens: expected 0 to {self.length}, got {tokens}")
        self.length -= tokens
        needed = -(-self.length // self.pool.geometry.page_size)
        self.pool.release(self.table[needed:])
        del self.table[needed:]

    def free(self) -> None:
        """Give every page back; the sequence is empty then and can be used again."""
        self.settle()
        self.crop(self.length)
