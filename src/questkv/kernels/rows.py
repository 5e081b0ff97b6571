"""`Rows`: query tokens, one of one sequence each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from questkv.kernels.checked import Checked, check_indices


@dataclass(frozen=True, eq=False)
class Rows(Checked):
    """R query tokens, each of one sequence: the pages it has, the tokens it sees, how many pages it may read.

    One `Rows` serves all layers of a decode step: the values are checked with the first of them (see `Checked`).

    Attributes:
        page_table: [R, P] int64 physical page of every logical page, -1 past the row's pages; or [R, Hkv, P] where
            each KV head has pages of its own (`attend` and `dense`, not with backend ``native``).
        lengths: [R] int64 tokens visible to the row, its own included, 1 to P * S. The first (length - 1) // S pages
            are sealed; the last (length - 1) % S + 1 tokens lie in the open page.
        num_selected: [R] int64 K, sealed pages that the row may read (see `QuestConfig.pages_at`). `decode` needs it,
            and `estimate` uses it where spans have boxes; None elsewhere.

    Raises:
        ValueError: A shape or a device is wrong.
        TypeError: A dtype is wrong.
    """

    _forced: ClassVar[int] = -1  # sink and recent pages that K is known to have room for

    page_table: torch.Tensor
    lengths: torch.Tensor
    num_selected: torch.Tensor | None = None

    def __post_init__(self) -> None:
        table = self.page_table
        if table.ndim not in (2, 3):
            raise ValueError(f"[Rows] page_table: expected [R, P] or [R, Hkv, P], got {list(table.shape)}")
        check_indices("Rows", "page_table", table, table.device)
        for name, tensor in (("lengths", self.lengths), ("num_selected", self.num_selected)):
            if tensor is None:
                continue
            if list(tensor.shape) != [table.shape[0]]:
                raise ValueError(f"[Rows] {name}: expected [R={table.shape[0]}], got {list(tensor.shape)}")
            check_indices("Rows", name, tensor, table.device)
        self._watch(table, self.lengths, self.num_selected)

    def holds(self, forced: int) -> bool:
        """Whether K is known to have room for so many pages; asked after `fits`."""
        return forced <= self._forced

    def note_forced(self, forced: int) -> None:
        """K has room for so many pages, in every row that has them."""
        object.__setattr__(self, "_forced", forced)

    def _know(self, layout: tuple[Any, ...]) -> None:
        super()._know(layout)
        self.note_forced(-1)

    def selecting(self, num_selected: torch.Tensor | None) -> Rows:
        """The same rows with another K, their page table and lengths as well known as here."""
        rows = Rows(self.page_table, self.lengths, num_selected)
        known = self._known
        if known is not None and known[1] == self._version():
            rows._know(known[0])
        return rows
