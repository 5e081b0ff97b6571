"""Layers of equal geometry, which share a page table, and how one of them attends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from questkv import kernels
from questkv.hf.counts import PageCounts
from questkv.hf.plan import Plan
from questkv.kernels import Softmax
from questkv.pages import PagePool, SequenceBatch, offload
from questkv.pages.fetched import FetchedPages


@dataclass
class Group:
    """Layers of equal geometry: one pool, one page table.

    Attributes:
        pool: Their pages.
        batch: Their sequences.
        layers: The pool's layer of every model layer.
        plan: How the tokens of the running forward are attended.
    """

    pool: PagePool
    batch: SequenceBatch
    layers: dict[int, int] = field(default_factory=dict)
    plan: Plan | None = None

    def attend(
        self, layer: int, query: torch.Tensor, softmax: Softmax, counts: PageCounts, asked: list[int] | None = None
    ) -> torch.Tensor:
        """[T, Hq, D] -> [T, Hq, Dv]: dense blocks for the plan's runs, decode for its rows; all tokens are written.

        `asked` are the queries of every sequence where these are fewer than its new tokens, of which they are the last.
        """
        plan = self._plan()
        if asked is not None:
            plan = Plan(plan.step, plan.config, asked)
        if len(query) and plan.every_query_is_a_row:
            return self._decode(layer, plan, query, softmax, counts)
        out = query.new_empty((*query.shape[:2], self.pool.geometry.value_dim))
        if not len(query):
            return out  # a chunk of padding: the pool may have no page yet
        pages = self.pool.layer(self.layers[layer])
        for run in plan.runs:
            out[run.tokens] = kernels.prefill(
                query[run.tokens],
                pages,
                run.page_table,
                run.length,
                scale=softmax.scale,
                softcap=softmax.softcap,
                sinks=softmax.sinks,
                backend=plan.config.backend,
            )
        if len(plan.rows):
            out[plan.rows] = self._decode(layer, plan, query[plan.rows], softmax, counts)
        return out

    def step(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        softmax: Softmax,
        counts: PageCounts,
    ) -> torch.Tensor:
        """[T, Hq, D] -> [T, Hq, Dv] in a decode step: [T, Hkv, D] keys and [T, Hkv, Dv] values are written."""
        plan = self._plan()
        pages = self.pool.layer(self.layers[layer])
        pages_read = torch.empty_like(plan.lengths)
        out = plan.decode_step(pages).decode(
            query, pages, plan.num_selected_in(layer), keys, values, pages_read=pages_read, **_rule(plan, softmax)
        )
        self.batch.written(self.layers[layer])
        counts.add(layer, pages_read, plan.pages_held * pages.num_kv_heads)
        return out

    def _decode(
        self, layer: int, plan: Plan, query: torch.Tensor, softmax: Softmax, counts: PageCounts
    ) -> torch.Tensor:
        """[R, Hq, D] -> [R, Hq, Dv]: the plan's rows, from pages on the device or in host memory."""
        pages_read = torch.empty_like(plan.lengths)
        rule = {**_rule(plan, softmax), "pages_read": pages_read, "backend": plan.config.backend}
        pages, fetched = self.pool.layer(self.layers[layer]), self.pool.fetched(self.layers[layer])
        if fetched is None:
            selected = plan.num_selected_in(layer)
            out = kernels.decode(query, pages, plan.page_table, plan.lengths, selected, **rule)
        else:
            out = self._fetch_and_decode(layer, plan, query, fetched, rule, counts)
        counts.add(layer, pages_read, plan.pages_held * pages.num_kv_heads)
        return out

    def _fetch_and_decode(
        self,
        layer: int,
        plan: Plan,
        query: torch.Tensor,
        fetched: FetchedPages,
        rule: dict[str, Any],
        counts: PageCounts,
    ) -> torch.Tensor:
        selected_counts = plan.selected_counts_in(layer)
        heads = offload.lists_a_kv_head(query, self.pool.geometry.kv_heads, plan.config.group)
        fetched.reserve(plan.places(heads, selected_counts))
        fetches = torch.zeros(2, dtype=torch.int64, device=query.device)
        out = offload.decode(
            query,
            fetched,
            plan.page_table,
            plan.lengths,
            plan.num_selected_in(layer),
            plan.row_lengths,
            selected_counts,
            fetches,
            **rule,
        )
        counts.add_fetches(layer, fetches)
        return out

    def _plan(self) -> Plan:
        assert self.plan is not None, "a forward is under way"
        return self.plan


def _rule(plan: Plan, softmax: Softmax) -> dict[str, Any]:
    """How a decode step scores, selects and weighs."""
    config = plan.config
    return {
        "scale": softmax.scale,
        "softcap": softmax.softcap,
        "sinks": softmax.sinks,
        "optimism": config.optimism,
        "group": config.group,
        "sink_pages": config.sink_pages,
        "recent_pages": config.recent_pages,
    }
