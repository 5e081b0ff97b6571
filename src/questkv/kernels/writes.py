"""`Places` and `Writes`: the tokens that `decode` writes before it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv.kernels.checked import Checked, check_indices


@dataclass(frozen=True, eq=False)
class Places(Checked):
    """Where the new tokens of a decode step go, and which pages they seal: the same in every layer of one geometry.

    One `Places` serves all layers of a decode step: the values are checked with the first of them (see `Checked`).

    Attributes:
        slots: [n] int64 ``physical page * S + slot in the page`` of every token, all different.
        sealed: [m] int64 physical pages that are full and have a token behind them now.
        into: [m] int64 coded pages that those are coded into, as in `seal`; None leaves them as they are.
        spans: [k, C] int64 physical pages of the spans that are complete now, as in `seal_spans`; None where spans
            have no boxes.

    Raises:
        ValueError: A shape or a device is wrong.
        TypeError: A dtype is wrong.
    """

    slots: torch.Tensor
    sealed: torch.Tensor
    into: torch.Tensor | None = None
    spans: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, shape in (("slots", "[n]"), ("sealed", "[m]"), ("into", "[m]"), ("spans", "[k, C]")):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.ndim != (2 if name == "spans" else 1):
                raise ValueError(f"[Places] {name}: expected {shape}, got {list(tensor.shape)}")
            check_indices("Places", name, tensor, self.slots.device)
        if self.into is not None and self.into.shape != self.sealed.shape:
            raise ValueError(
                f"[Places] into: expected a page for each of the {len(self.sealed)} in sealed, got {len(self.into)}"
            )
        self._watch(self.slots, self.sealed, self.into, self.spans)


@dataclass(frozen=True, eq=False, slots=True)
class Writes:
    """A layer's new tokens; `decode` checks that they fit the pages.

    Attributes:
        keys: [n, Hkv, D] the pages' dtype and device, any strides.
        values: [n, Hkv, Dv] likewise.
        places: Where the n tokens go.
    """

    keys: torch.Tensor
    values: torch.Tensor
    places: Places
