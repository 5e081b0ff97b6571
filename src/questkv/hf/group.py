"""Layers of equal geometry, which share a page table, and how one of them attends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from questkv import kernels
from questkv.hf.counts import PageCounts
from questkv.hf.plan import Plan
from questkv.kernels import Softmax, Writes
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
                softmax,
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
        rows = plan.rows_in(layer)
        pages_read = torch.empty_like(rows.lengths)
        writes = Writes(keys, values, plan.step.places)
        backend = plan.config.backend
        out = kernels.decode(
            query, pages, rows, softmax, plan.scoring, writes=writes, pages_read=pages_read, backend=backend
        )
        self.batch.written(self.layers[layer])
        counts.add(layer, pages_read, plan.pages_held * pages.num_kv_heads)
        return out

    def _decode(
        self, layer: int, plan: Plan, query: torch.Tensor, softmax: Softmax, counts: PageCounts
    ) -> torch.Tensor:
        """[R, Hq, D] -> [R, Hq, Dv]: the plan's rows, from pages on the device or in host memory."""
        rows = plan.rows_in(layer)
        pages_read = torch.empty_like(rows.lengths)
        pages, fetched = self.pool.layer(self.layers[layer]), self.pool.fetched(self.layers[layer])
        if fetched is None:
            backend = plan.config.backend
            out = kernels.decode(query, pages, rows, softmax, plan.scoring, pages_read=pages_read, backend=backend)
        else:
            out, fetches = self._fetch_and_decode(layer, plan, query, softmax, fetched, pages_read)
            counts.add_fetches(layer, fetches)
        counts.add(layer, pages_read, plan.pages_held * pages.num_kv_heads)
        return out

    def _fetch_and_decode(
        self,
        layer: int,
        plan: Plan,
        query: torch.Tensor,
        softmax: Softmax,
        fetched: FetchedPages,
        pages_read: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        selected_counts = plan.selected_counts_in(layer)
        heads = offload.lists_a_kv_head(query, self.pool.geometry.kv_heads, plan.config.group)
        fetched.reserve(plan.places(heads, selected_counts))
        fetches = torch.zeros(2, dtype=torch.int64, device=query.device)
        out = offload.decode(
            query,
            fetched,
            offload.HostRows(plan.rows_in(layer), plan.row_lengths, selected_counts),
            softmax,
            plan.scoring,
            pages_read=pages_read,
            fetches=fetches,
            backend=plan.config.backend,
        )
        return out, fetches

    def _plan(self) -> Plan:
        assert self.plan is not None, "a forward is under way"
        return self.plan
