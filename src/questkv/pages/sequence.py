"""One sequence: its length and its page table."""

from __future__ import annotations

from questkv.pages.pool import PagePool


class Sequence:
    """A list of physical pages and how many tokens they hold.

    A sequence is a value: what changes it makes another, so that a batch goes from one state to the next by one
    assignment, and back. Its pages are counted as held while a batch has it.

    The table has exactly the pages that `length` tokens need. Pages may be shared with other sequences; only
    `SequenceBatch.reserve` makes them writable, by copying a shared page first.

    Where sealed pages move, a step puts the closed page in the plain one's place at once. The pages that a step
    took out of the table stay held until it ends: its own tokens read them, and undoing it puts them back.

    Args:
        pool: Where the pages come from.
        table: Physical pages.
        length: Tokens.
        before: What stood at a logical page since the step under way began, oldest first.
    """

    def __init__(
        self,
        pool: PagePool,
        table: list[int] | None = None,
        length: int = 0,
        before: dict[int, list[int]] | None = None,
    ) -> None:
        self.pool = pool
        self.table = table or []
        self.length = length
        self._before = before or {}

    @property
    def sealed_pages(self) -> int:
        """Pages that are full and have a token behind them; the last page is open and has no box."""
        return max(self.length - 1, 0) // self.pool.geometry.page_size

    @property
    def written_table(self) -> list[int]:
        """The table with the plain pages that the step under way writes, where `table` has what they move into."""
        if not self._before:
            return self.table
        return [
            self._before[logical][-1] if logical in self._before and self.pool.is_closed(page) else page
            for logical, page in enumerate(self.table)
        ]

    @property
    def replaced(self) -> list[int]:
        """Pages that the step under way took out of the table; the sequence still holds them."""
        return [page for pages in self._before.values() for page in pages]

    @property
    def pages(self) -> list[int]:
        """Every page that the sequence holds, as often as it does."""
        return self.table + self.replaced if self._before else self.table

    def replace(self, logical: int, page: int) -> None:
        """While the sequence is being made: put another page into the table until the step ends, and for good then."""
        self._before.setdefault(logical, []).append(self.table[logical])
        self.table[logical] = page

    def settled(self) -> Sequence:
        """The sequence without the pages that a step took out of the table."""
        return Sequence(self.pool, self.table, self.length) if self._before else self

    def cropped(self, tokens: int) -> Sequence:
        """The sequence without its last `tokens` tokens; a sealed page that becomes the last one is open again.

        Raises:
            ValueError: The sequence has fewer tokens.
        """
        if not 0 <= tokens <= self.length:
            raise ValueError(f"[crop] tokens: expected 0 to {self.length}, got {tokens}")
        length = self.length - tokens
        return Sequence(self.pool, self.table[: -(-length // self.pool.geometry.page_size)], length)
