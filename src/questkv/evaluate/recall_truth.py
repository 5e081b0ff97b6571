"""Dense attention of a layer's decode steps, cut into pages: what a selection of pages would have kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from questkv.evaluate.recall_steps import LayerSteps
from questkv.policies.softmax import attention_logits, attention_weights

TOP_TOKENS = 10


class DenseTruth:
    """What dense attention gives in float32, per row and query head.

    Attributes:
        weights: [R, Hq, n] softmax weights; 0 behind a row's own tokens.
        total: [R, Hq] sum of the weights: 1, but for rounding and what a sink takes.
        sink: [R, Hq] weight of the attention sink (gpt-oss), 0 without one.
        out: [R, Hq, Dv] the attention's output.
    """

    def __init__(self, steps: LayerSteps) -> None:
        self.steps = steps
        logits = self._logits(steps.keys)
        self.weights = self._by_row(attention_weights(logits, steps.softmax))
        self.total = self.weights.sum(dim=-1)
        # Logarithm of what every weight is a share of.
        self._log_sum = self._by_row(logits).logsumexp(dim=-1)
        self.sink = torch.zeros_like(self.total)
        if steps.softmax.sinks is not None:
            sinks = steps.softmax.sinks.float()
            self._log_sum = torch.logaddexp(self._log_sum, sinks)
            self.sink = (sinks - self._log_sum).exp()
        self.out = (self.weights.unflatten(1, (-1, steps.group)) @ steps.values.float()).flatten(1, 2)

    @cached_property
    def top(self) -> torch.Tensor:
        """[R, Hq, n] 1 / 10 at the ten tokens of largest weight, else 0; a row of fewer tokens has them all."""
        count = min(TOP_TOKENS, int(self.steps.lengths.min()))
        best = self.weights.topk(count, dim=-1).indices
        top: torch.Tensor = torch.zeros_like(self.weights).scatter_(2, best, 1.0 / count)
        return top

    def mass(self, page_size: int) -> torch.Tensor:
        """[R, Hq, P] share of a row's attention mass that lies in each page; a row's shares sum to 1."""
        return self._by_page(self.weights, page_size).sum(dim=-1) / self.total[..., None]

    def contents(self, page_size: int, coded: tuple[torch.Tensor, torch.Tensor] | None = None) -> PageContents:
        """What each page holds of the truth.

        Args:
            page_size: S.
            coded: Keys [Hkv, n, D] and values [Hkv, n, Dv] as rows read them from sealed pages, if not as they were.
        """
        read = self._outputs(self.weights, self.steps.values, page_size)
        if coded is not None:
            keys, values = coded
            weights = (self._by_row(self._logits(keys)) - self._log_sum[..., None]).exp()
            pages = torch.arange(read.shape[2], device=read.device)
            sealed = pages < torch.div(self.steps.lengths - 1, page_size, rounding_mode="floor")[:, None]
            read = torch.where(sealed[:, None, :, None], self._outputs(weights, values, page_size), read)
        mass, top = (self._by_page(of, page_size).sum(dim=-1)[..., None] for of in (self.weights, self.top))
        return PageContents(self, torch.cat([read, mass, top], dim=-1))

    def _logits(self, keys: torch.Tensor) -> torch.Tensor:
        """[Hkv, G * R, n] logits of every row with these keys; -inf behind a row's own tokens."""
        steps = self.steps
        grouped = steps.queries.unflatten(1, (-1, steps.group)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G * R, D]
        logits = attention_logits(grouped, keys, steps.softmax).unflatten(1, (-1, len(steps.lengths)))
        behind = torch.arange(logits.shape[3], device=logits.device) >= steps.lengths[:, None]
        masked: torch.Tensor = logits.masked_fill(behind, -torch.inf)
        return masked.flatten(1, 2)

    def _by_row(self, grouped: torch.Tensor) -> torch.Tensor:
        """[Hkv, G * R, n] -> [R, Hq, n]."""
        rows: torch.Tensor = grouped.unflatten(1, (-1, len(self.steps.lengths)))
        return rows.flatten(0, 1).transpose(0, 1)

    def _outputs(self, weights: torch.Tensor, values: torch.Tensor, page_size: int) -> torch.Tensor:
        """[R, Hq, P, Dv + 1]: each page's sum of weighted values, and of weights."""
        weights = self._by_page(weights, page_size)  # [R, Hq, P, S]
        values = self._by_page(values.float().transpose(1, 2), page_size)  # [Hkv, Dv, P, S]
        grouped = weights.unflatten(1, (-1, self.steps.group))
        outputs = torch.einsum("rhgps,hdps->rhgpd", grouped, values).flatten(1, 2)
        return torch.cat([outputs, weights.sum(dim=-1)[..., None]], dim=-1)

    def _by_page(self, tokens: torch.Tensor, page_size: int) -> torch.Tensor:
        """[..., n] -> [..., P, S], the last page filled up with zeros."""
        missing = -tokens.shape[-1] % page_size
        pages: torch.Tensor = torch.nn.functional.pad(tokens, (0, missing)).unflatten(-1, (-1, page_size))
        return pages


@dataclass(frozen=True, eq=False)
class Kept:
    """What C selections kept.

    Attributes:
        mass: [C, R, Hq] share of the attention mass inside the selection.
        top: [C, R, Hq] share of the ten most attended tokens inside it.
        error: [C, R] relative error of the layer's output: norm of the difference over norm of the truth, all heads.
        tokens: [C, R] tokens read, summed over KV heads; a page that several heads of a group chose counts once.
    """

    mass: torch.Tensor
    top: torch.Tensor
    error: torch.Tensor
    tokens: torch.Tensor


class PageContents:
    """Output, mass and top tokens of every page: sums over the chosen pages give what a selection keeps.

    Args:
        truth: Where they come from.
        contents: [R, Hq, P, Dv + 3] float32: the page's share of the output and its weight, as they are read; its true
            attention mass, its share of the top tokens.
    """

    def __init__(self, truth: DenseTruth, contents: torch.Tensor) -> None:
        self._truth = truth
        self._contents = contents

    @property
    def num_pages(self) -> int:
        """P, the open page included."""
        return self._contents.shape[2]

    def kept(self, chosen: torch.Tensor, page_tokens: torch.Tensor) -> Kept:
        """What selections keep.

        Args:
            chosen: [C, R, Hq, P] bool, logical pages that each query head reads, its open page included.
            page_tokens: [R, P] int64 tokens of each page that a row sees.
        """
        truth = self._truth
        sums = (chosen.permute(1, 2, 0, 3).float() @ self._contents).permute(2, 0, 1, 3)  # [C, R, Hq, D + 3]
        weight = sums[..., -3]
        out = sums[..., :-3] / (weight + truth.sink)[..., None]
        difference = (out - truth.out).flatten(2).norm(dim=-1)
        read = chosen.unflatten(2, (-1, truth.steps.group)).any(dim=3)  # [C, R, Hkv, P]
        return Kept(
            mass=sums[..., -2] / truth.total,
            top=sums[..., -1],
            error=difference / truth.out.flatten(1).norm(dim=-1),
            tokens=(read * page_tokens[:, None]).sum(dim=(2, 3)),
        )
