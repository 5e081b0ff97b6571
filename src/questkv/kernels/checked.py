"""What the structs of the operators have in common: a backend's own form of them, and values looked at once."""

from __future__ import annotations

from typing import Any

import torch

from questkv.kernels.types import Pages


class Bound:
    """A struct that a backend may keep its own form of.

    Attributes:
        bound: What a backend has made of it, None before.
    """

    bound: Any = None

    def bind(self, bound: Any) -> Any:
        """Keep what a backend has made of it, and give it back."""
        object.__setattr__(self, "bound", bound)
        return bound


class Checked(Bound):
    """What the layers of one geometry share in a decode step.

    The values are checked against the pages of the first layer that is given them, and again only for pages of another
    layout, or after a tensor was changed in place. Tensors that were made in inference mode don't tell whether they
    were changed: those must stay as they are.
    """

    _tensors: tuple[torch.Tensor, ...] = ()
    _known: tuple[tuple[Any, ...], int] | None = None

    def fits(self, pages: Pages) -> bool:
        """Whether nothing is left to check for these pages."""
        known = self._known
        if known is None or known[1] != self._version():
            return False
        return known[0] == pages.layout or _has_grown(pages.layout, known[0])

    def note(self, pages: Pages) -> None:
        """The values are right for pages laid out as these."""
        self._know(pages.layout)

    def _watch(self, *tensors: torch.Tensor | None) -> None:
        watched = tuple(tensor for tensor in tensors if tensor is not None and not tensor.is_inference())
        object.__setattr__(self, "_tensors", watched)

    def _know(self, layout: tuple[Any, ...]) -> None:
        object.__setattr__(self, "_known", (layout, self._version()))
        self.bind(None)

    def _version(self) -> int:
        version = 0
        for tensor in self._tensors:
            version += tensor._version
        return version


def _has_grown(layout: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether pages of one layout are those of another and segments behind them, as a pool that grew has them."""
    return layout[1:] == before[1:] and layout[0][: len(before[0])] == before[0]


def check_indices(struct: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Indices are int64, all of a struct on one device."""
    if tensor.dtype != torch.int64:
        raise TypeError(f"[{struct}] {name}: expected int64, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"[{struct}] {name}: expected device {device}, got {tensor.device}")
