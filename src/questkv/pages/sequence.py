"""One sequence: its length and its page table."""

from __future__ import annotations

from questkv.pages.pool import PagePool


class Sequence:
    """A list of physical pages and how many tokens they hold.

    The table has exactly the pages that `length` tokens need. Pages may be shared with other sequences; only
    `SequenceBatch.reserve` makes them writable, by copying a shared page first.

    Args:
        pool: Where the pages come from.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.table: list[int] = []
        self.length = 0

    @property
    def sealed_pages(self) -> int:
        """Pages that are full and have a token behind them; the last page is open and has no box."""
        return max(self.length - 1, 0) // self.pool.geometry.page_size

    def fork(self) -> Sequence:
        """A second sequence with the same tokens, sharing every page."""
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
        self.crop(self.length)
