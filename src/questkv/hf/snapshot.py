"""What a cache holds at one moment, so that a forward or an operation that fails can be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from questkv.hf.attendance import Attendance, Knowledge
from questkv.hf.counts import Counted
from questkv.hf.group import Group
from questkv.hf.own_layers import Held
from questkv.pages import BatchState, PageGeometry

if TYPE_CHECKING:
    from questkv.hf.state import PagedState


@dataclass(frozen=True)
class Snapshot:
    """Everything that a forward or an operation changes; pages are not copied, since none that is held is written over.

    Attributes:
        groups: The groups of paged layers.
        batches: Their sequences, in the same order.
        columns: Columns of all complete forwards.
        real: [B, columns] False where a column is padding, or None.
        attendance: What knows the model's layers.
        knowledge: What it knew.
        counts: Pages counted.
        own: What transformers' own layers hold; None where that wasn't looked at in time.
    """

    groups: dict[PageGeometry, Group]
    batches: list[BatchState]
    columns: int
    real: torch.Tensor | None
    attendance: Attendance
    knowledge: Knowledge
    counts: Counted
    own: list[Held] | None

    @staticmethod
    def of(state: PagedState, *, own: bool) -> Snapshot:
        """What `state` holds, and with `own` what transformers' own layers do."""
        return Snapshot(
            dict(state.groups),
            [group.batch.state for group in state.groups.values()],
            state.columns,
            state.real,
            state.attendance,
            state.attendance.knowledge,
            state.counts.counted,
            state.own.held() if own else None,
        )

    def put_back(self, state: PagedState) -> None:
        """Have `state` hold that again; may be done again if an exception ends it."""
        for group, batch in zip(self.groups.values(), self.batches, strict=True):
            group.batch.put_back(batch)
        state.groups = dict(self.groups)
        state.columns, state.real = self.columns, self.real
        state.attendance = self.attendance
        state.attendance.knowledge = self.knowledge
        state.counts.counted = self.counts
        if self.own is not None:
            state.own.put_back(self.own)
