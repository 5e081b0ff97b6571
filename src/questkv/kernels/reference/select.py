"""select: the pages of highest score, first and last ones always among them."""

from __future__ import annotations

import torch

from questkv.kernels.scoring import Scoring


def select(scores: torch.Tensor, num_pages: torch.Tensor, num_selected: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """First the sink pages, then the best of what lies between in ascending order, then the recent pages."""
    sink_pages, recent_pages = scoring.sink_pages, scoring.recent_pages
    counts = torch.minimum(num_pages, num_selected)
    width = int(counts.max()) if len(counts) else 0
    selection = scores.new_full((*scores.shape[:2], width), -1, dtype=torch.int64)
    for row, (pages, count) in enumerate(zip(num_pages.tolist(), counts.tolist(), strict=True)):
        every = torch.arange(pages, device=scores.device)
        if count == pages:
            selection[row, :, :count] = every
            continue
        between = slice(sink_pages, pages - recent_pages)
        free = scores[row, :, between].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        # A stable sort keeps equal scores in page order, so the lower page wins a tie.
        order = free.sort(dim=-1, descending=True, stable=True).indices
        best = order[:, : count - sink_pages - recent_pages].sort(dim=-1).values + sink_pages
        selection[row, :, :sink_pages] = every[:sink_pages]
        selection[row, :, sink_pages : count - recent_pages] = best
        selection[row, :, count - recent_pages : count] = every[pages - recent_pages :]
    return selection
