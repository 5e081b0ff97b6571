"""The operators with the fields of their structs as arguments, so that a test's call says what is special in it."""

from __future__ import annotations

from typing import Any

import torch

from questkv import kernels
from questkv.kernels import Pages, Rows, Scoring, Softmax, Writes


def _softmax(fields: dict[str, Any]) -> Softmax:
    return Softmax(*(fields.pop(name, None) for name in ("scale", "softcap", "sinks")))


def _scoring(fields: dict[str, Any], forced: tuple[int, int]) -> Scoring:
    """The paper's bound, unless a test says otherwise."""
    optimism, group = fields.pop("optimism", 1.0), fields.pop("group", "mean")
    return Scoring(optimism, group, fields.pop("sink_pages", forced[0]), fields.pop("recent_pages", forced[1]))


def estimate(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor | None = None,
    **fields: Any,
) -> torch.Tensor:
    """`kernels.estimate`."""
    scale, scoring = fields.pop("scale"), _scoring(fields, (0, 0))
    return kernels.estimate(q, pages, Rows(page_table, lengths, num_selected), scale, scoring, **fields)


def select(scores: torch.Tensor, num_pages: torch.Tensor, num_selected: torch.Tensor, **fields: Any) -> torch.Tensor:
    """`kernels.select`, which forces no page unless it is told to."""
    return kernels.select(scores, num_pages, num_selected, _scoring(fields, (0, 0)), **fields)


def attend(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    selection: torch.Tensor,
    **fields: Any,
) -> torch.Tensor:
    """`kernels.attend`."""
    return kernels.attend(q, pages, Rows(page_table, lengths), selection, _softmax(fields), **fields)


def dense(
    q: torch.Tensor, pages: Pages, page_table: torch.Tensor, lengths: torch.Tensor, **fields: Any
) -> torch.Tensor:
    """`kernels.dense`."""
    return kernels.dense(q, pages, Rows(page_table, lengths), _softmax(fields), **fields)


def prefill(q: torch.Tensor, pages: Pages, page_table: torch.Tensor, length: int, **fields: Any) -> torch.Tensor:
    """`kernels.prefill`."""
    return kernels.prefill(q, pages, page_table, length, _softmax(fields), **fields)


def decode(
    q: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    num_selected: torch.Tensor,
    *,
    writes: Writes | None = None,
    **fields: Any,
) -> torch.Tensor:
    """`kernels.decode`, with one sink and four recent pages unless it is told otherwise."""
    softmax, scoring = _softmax(fields), _scoring(fields, (1, 4))
    return kernels.decode(q, pages, Rows(page_table, lengths, num_selected), softmax, scoring, writes=writes, **fields)
