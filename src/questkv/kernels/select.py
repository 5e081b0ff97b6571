"""select: choose the pages to read."""

from __future__ import annotations

import torch

from questkv.kernels import dispatch
from questkv.kernels.scoring import DEFAULT, Scoring


def select(
    scores: torch.Tensor,
    num_pages: torch.Tensor,
    num_selected: torch.Tensor,
    scoring: Scoring = DEFAULT,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Choose, per row and head, the pages of highest score, the first and the last ones always among them.

    Ties go to the lower page; a NaN score counts as +inf, so nothing is hidden. What a row selects depends on its own
    scores only (paper, section 3.4: the K pages of highest score).

    Args:
        scores: [R, H, P] float32 as `estimate` returns them.
        num_pages: [R] int64 sealed pages of the row, at most P; scores behind them are not looked at.
        num_selected: [R] int64, K of the row; a row with fewer pages selects all of them.
        scoring: Its sink and recent pages, which are always selected.
        backend: ``auto`` or a backend's name.

    Returns:
        [R, H, K] int64 logical pages, ascending, K the most that a row selects; shorter rows end in -1.

    Raises:
        ValueError: A shape is wrong, or a row's `num_selected` can't hold its sink and recent pages.
        TypeError: A dtype is wrong.

    Example:
        >>> scores = torch.tensor([[[0.1, 0.5, 0.2, 0.9, 0.3]]])
        >>> num_pages, num_selected = torch.tensor([5]), torch.tensor([2])
        >>> select(scores, num_pages, num_selected, Scoring(sink_pages=1, recent_pages=0))
        tensor([[[0, 3]]])
    """
    if scores.ndim != 3:
        raise ValueError(f"[select] scores: expected [R, H, P], got {list(scores.shape)}")
    if scores.dtype != torch.float32:
        raise TypeError(f"[select] scores: expected float32, got {scores.dtype}")
    for name, value in (("num_pages", num_pages), ("num_selected", num_selected)):
        if list(value.shape) != [scores.shape[0]]:
            raise ValueError(f"[select] {name}: expected [R={scores.shape[0]}], got {list(value.shape)}")
        if value.dtype != torch.int64:
            raise TypeError(f"[select] {name}: expected int64, got {value.dtype}")
        if value.device != scores.device:
            raise ValueError(f"[select] {name}: expected device {scores.device}, got {value.device}")
    _check_counts(scores, num_pages, num_selected, scoring.forced_pages)
    selection: torch.Tensor = dispatch.resolve(backend, scores.device).select(scores, num_pages, num_selected, scoring)
    return selection


def _check_counts(scores: torch.Tensor, num_pages: torch.Tensor, num_selected: torch.Tensor, forced: int) -> None:
    # Reading values back would stop the host on a GPU; there the caller vouches for them.
    if scores.device.type != "cpu" or not num_pages.numel():
        return
    if int(num_pages.min()) < 0 or int(num_pages.max()) > scores.shape[2]:
        raise ValueError(f"[select] num_pages: expected 0 to P={scores.shape[2]}, got {num_pages.tolist()}")
    if bool((num_selected < num_pages.clamp(max=forced)).any()):
        raise ValueError(
            f"[select] num_selected: expected at least the {forced} sink and recent pages, got {num_selected.tolist()}"
        )
