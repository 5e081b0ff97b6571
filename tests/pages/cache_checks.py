"""What a pool and its batches must hold, against plain lists of keys and values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from kernels.eight_bits import decoded_keys, decoded_values
from pages.token_formulas import attention, boxes, int8_boxes, tolerance
from questkv import kernels
from questkv.kernels import Rows, Scoring, Softmax
from questkv.pages import PagePool, SequenceBatch, offload

LAYERS = 2
SCALE = 0.7


@dataclass(frozen=True)
class Token:
    """What every layer stores of a token: keys [LAYERS, Hkv, D] and values, float32.

    `boxed` are the keys that its page's box was made of: those before they were coded, if the page is.
    """

    keys: torch.Tensor
    values: torch.Tensor
    boxed: torch.Tensor


@dataclass
class Tracked:
    """A batch and what each of its sequences should hold."""

    batch: SequenceBatch
    tokens: list[list[Token]]
    interrupted: bool = False

    @property
    def tables(self) -> list[list[int]]:
        """The sequences' tables, those of an interrupted step as they are when it has been undone."""
        return [
            [sequence._before.get(logical, [page])[0] if self.interrupted else page for logical, page in pages]
            for sequence in self.batch.sequences
            for pages in [list(enumerate(sequence.table))]
        ]


class CacheChecks:
    """Checks of one pool, `group` query heads to a KV head; `tracked` are the batches that hold its pages."""

    pool: PagePool
    tracked: list[Tracked]
    group: int
    page_size: int
    backend: str
    random: torch.Generator

    def _poison(self) -> None:
        """Fill every slot without a token and every box of a page that isn't sealed with NaN."""
        used: Counter[int] = Counter()
        sealed = set()
        spans = set()
        size = self.pool.geometry.span_pages
        for tracked in self.tracked:
            for table, tokens in zip(tracked.tables, tracked.tokens, strict=True):
                for logical in range(-(-len(tokens) // self.page_size)):
                    page = table[logical]
                    used[page] = max(used[page], min(self.page_size, len(tokens) - logical * self.page_size))
                    # A code means nothing without its box, though a crop may have opened the page again.
                    if len(tokens) > (logical + 1) * self.page_size or self.pool.is_closed(page):
                        sealed.add(page)
                        if size and logical % size == size - 1 and len(tokens) > (logical + 1) * self.page_size:
                            spans.add(page)
        for layer in range(LAYERS if self.pool.num_pages else 0):
            for page in range(self.pool.num_pages):
                segment, at = self.pool._locate(layer, page)
                if not segment.coded:
                    segment.keys[:, at, used[page] :] = torch.nan
                    segment.values[:, at, used[page] :] = torch.nan
                elif page not in sealed:
                    segment.value_scales[:, at] = torch.nan
                if page not in sealed:
                    segment.boxes[:, at] = 127 if segment.scales is not None else torch.nan
                    if segment.scales is not None:
                        segment.scales[:, at] = torch.nan
                if self.pool.geometry.ends_span(page) and page not in spans:
                    span = segment.keys.shape[1] + at // size
                    segment.boxes[:, span] = 127 if segment.scales is not None else torch.nan
                    if segment.scales is not None:
                        segment.scales[:, span] = torch.nan

    def _check_tokens(self, layer: int, table: list[int], tokens: list[Token]) -> None:
        for index, token in enumerate(tokens):
            segment, at = self.pool._locate(layer, table[index // self.page_size])
            slot = index % self.page_size
            keys, values = segment.keys[:, at], segment.values[:, at]
            if segment.coded:
                keys = decoded_keys(keys, segment.boxes[:, at], segment.scales[:, at])
                values = decoded_values(values, segment.value_scales[:, at])
            assert torch.equal(keys[:, slot].float(), token.keys[layer])
            assert torch.equal(values[:, slot].float(), token.values[layer])

    def _check_boxes(self, layer: int, table: list[int], tokens: list[Token]) -> None:
        for page in range(max(len(tokens) - 1, 0) // self.page_size):
            own = tokens[page * self.page_size :][: self.page_size]
            keys = torch.stack([token.boxed[layer] for token in own])
            lo, hi = boxes(keys)
            segment, at = self.pool._locate(layer, table[page])
            assert segment.coded == (self.pool.geometry.kv_dtype == "int8")
            assert self.pool.is_closed(table[page]) == self.pool.geometry.closes
            assert segment.host == (self.pool.geometry.offload == "host" and layer == LAYERS - 1)
            stored = segment.boxes[:, at].double()
            if segment.scales is None:
                assert torch.equal(stored, torch.stack([lo, hi], dim=1))
                continue
            scale = segment.scales[:, at]
            code_lo, code_hi = int8_boxes(lo, hi, scale)
            # Division may round onto the wrong side of a whole code, so the box may be one code wider, never narrower.
            assert ((stored[:, 0] <= code_lo) & (stored[:, 0] >= code_lo - 1)).all()
            assert ((stored[:, 1] >= code_hi) & (stored[:, 1] <= code_hi + 1)).all()
            bounds = stored * scale.double()[:, None, None]
            for held in (keys, torch.stack([token.keys[layer] for token in own])):
                # A decoded key is rounded to float32, so it may lie half of its last place outside.
                slack = 0 if held is keys else held.double().abs() * 2.0**-24
                assert (bounds[:, 0] <= held.double() + slack).all()
                assert (held.double() - slack <= bounds[:, 1]).all()
            # The scale is the smallest that reaches the largest value with 127 codes, give or take its rounding.
            largest = torch.maximum(lo.abs(), hi.abs()).amax(dim=1)
            assert torch.allclose(scale.double() * 127, largest, rtol=2.0**-21, atol=1e-30)

    def _check_spans(self, layer: int, table: list[int], tokens: list[Token]) -> None:
        size = self.pool.geometry.span_pages
        for first in range(0, max(len(tokens) - 1, 0) // self.page_size - size + 1, size) if size else ():
            bounds = []
            for page in table[first : first + size]:
                segment, at = self.pool._locate(layer, page)
                scale = 1 if segment.scales is None else segment.scales[:, at].double()[:, None, None]
                bounds.append(segment.boxes[:, at].double() * scale)
            lo, hi = (bound(torch.stack(bounds), dim=0) for bound in (torch.amin, torch.amax))
            lo, hi = lo[:, 0], hi[:, 1]
            assert at % size == size - 1
            span = segment.keys.shape[1] + at // size
            if segment.scales is None:
                assert torch.equal(segment.boxes[:, span].double(), torch.stack([lo, hi], dim=1))
                continue
            step = segment.scales[:, span].double()[:, None]
            assert torch.equal(
                step[:, 0], torch.stack([self._scale(layer, p) for p in table[first : first + size]]).amax(0)
            )
            below, above = (segment.boxes[:, span].double() * step[..., None]).unbind(1)
            # Rounded outward by less than a code, give or take the rounding of the division.
            assert ((below <= lo) & (below > lo - step * (1 + 1e-9))).all()
            assert ((above >= hi) & (above < hi + step * (1 + 1e-9))).all()

    def _scale(self, layer: int, page: int) -> torch.Tensor:
        segment, at = self.pool._locate(layer, page)
        return segment.scales[:, at].double()

    def _check_decode(self, layer: int, tracked: Tracked) -> None:
        every = tracked.tables
        # A page that a crop opened again stays coded until the next tokens are reserved.
        rows = [
            row
            for row, tokens in enumerate(tracked.tokens)
            if tokens and not self.pool.is_closed(every[row][(len(tokens) - 1) // self.page_size])
        ]
        if not rows:
            return
        tables = [every[row] for row in rows]
        width = max(map(len, tables))
        page_table = torch.tensor([table + [-1] * (width - len(table)) for table in tables])
        lengths = torch.tensor([len(tracked.tokens[row]) for row in rows])
        sealed = (lengths - 1) // self.page_size
        scoring = Scoring(optimism=1.0, sink_pages=1, recent_pages=1)
        geometry = self.pool.geometry
        heads = geometry.kv_heads * self.group
        q = torch.randn((len(rows), heads, geometry.head_dim), generator=self.random).to(geometry.dtype)
        pages = self.pool.layer(layer)
        for budget in (sealed, torch.minimum(sealed, torch.tensor(2))):
            of_budget = Rows(page_table, lengths, budget)
            scores = kernels.estimate(q, pages, of_budget, SCALE, scoring)
            selection = kernels.select(scores, sealed, budget, scoring)
            pages_read = torch.empty_like(lengths)
            out = self._decode(layer, q, of_budget, scoring, pages_read)
            assert torch.equal(pages_read, (budget + 1) * geometry.kv_heads)
            for i, row in enumerate(rows):
                self._check_row(layer, tracked.tokens[row], q[i], selection[i], int(budget[i]), out[i])

    def _decode(self, layer, q, rows, scoring, pages_read) -> torch.Tensor:
        how = {"pages_read": pages_read, "backend": self.backend}
        fetched = self.pool.fetched(layer)
        if fetched is None:
            return kernels.decode(q, self.pool.layer(layer), rows, Softmax(SCALE), scoring, **how)
        fetched.reserve(max(4, int(rows.num_selected.max())))
        # What was never fetched, or was of a page that nobody holds, is NaN.
        held = torch.tensor([self.pool.holders(page) > 0 for page in range(self.pool.num_pages)] + [False])
        void = ~held[fetched._page_of]
        for tensor in (fetched.segment.keys, fetched.segment.values, fetched.segment.value_scales):
            if tensor is not None and tensor.is_floating_point():
                tensor[void] = torch.nan
        known = offload.HostRows(rows, rows.lengths.tolist(), rows.num_selected.tolist())
        fetches = torch.zeros(2, dtype=torch.int64)
        return offload.decode(q, fetched, known, Softmax(SCALE), scoring, fetches=fetches, **how)

    def _check_row(self, layer, tokens, q, selection, count, out) -> None:
        sealed = (len(tokens) - 1) // self.page_size
        keys = torch.stack([token.keys[layer] for token in tokens])
        values = torch.stack([token.values[layer] for token in tokens])
        for head in range(self.pool.geometry.kv_heads):
            chosen = selection[head, :count].tolist()
            assert chosen == sorted(set(chosen))
            assert not chosen or (chosen[0] == 0 and chosen[-1] == sealed - 1)
            read = [page * self.page_size + slot for page in chosen for slot in range(self.page_size)]
            read += range(sealed * self.page_size, len(tokens))
            own = slice(head * self.group, (head + 1) * self.group)
            k, v = keys[read, head], values[read, head]
            error = (out[own].double() - attention(q[own], k, v, SCALE)).abs().max()
            assert error <= tolerance(q[own], k, v, SCALE, out.dtype)
