"""Decode steps behind a prefilled text: the queries, and the keys and values that they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from questkv import kernels
from questkv.config import QuestConfig
from questkv.evaluate.runner import Progress
from questkv.hf.cache import QuestCache
from questkv.hf.rotary import read_as
from questkv.kernels import Softmax
from questkv.kernels.gather import gather_tokens
from questkv.models import LoadedModel
from questkv.pages import PageGeometry
from questkv.policies import decode, prefill_context


@dataclass(frozen=True, eq=False)
class LayerSteps:
    """R decode steps of one layer, and the tokens that the last of them sees.

    Attributes:
        layer: The model's layer.
        queries: [R, Hq, D] after the rotary embedding, not scaled, the keys' dtype.
        keys: [Hkv, n, D] tokens in order; row r sees the first `lengths[r]`.
        values: [Hkv, n, Dv] likewise.
        lengths: [R] int64 tokens visible to each row, its own included.
        softmax: Scale, soft cap and sinks.
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    softmax: Softmax

    @property
    def group(self) -> int:
        """G, query heads that share a KV head."""
        return self.queries.shape[1] // self.keys.shape[0]

    def rows(self, rows: slice) -> LayerSteps:
        """Some of the steps, with the same tokens."""
        return replace(self, queries=self.queries[rows], lengths=self.lengths[rows])

    def geometry(self, page_size: int, box_dtype: str, kv_dtype: str = "model", span_pages: int = 0) -> PageGeometry:
        """The shape of this layer's pages of `page_size` tokens."""
        heads, _, dim = self.keys.shape
        page = (page_size, self.keys.dtype, self.keys.device, box_dtype, kv_dtype)
        return PageGeometry(heads, dim, *page, span_pages=span_pages, value_dim=self.values.shape[2])

    def paged(self, page_size: int, box_dtype: str, backend: str, span_pages: int = 0) -> kernels.Pages:
        """The tokens in pages of `page_size`, every full page and span sealed; logical page p is physical page p."""
        tokens = self.keys.shape[1]
        unit = max(span_pages, 1)
        room = -(-tokens // (page_size * unit)) * unit
        pages = kernels.Pages((self.geometry(page_size, box_dtype, span_pages=span_pages).allocate(room),))
        slots = torch.arange(tokens, device=self.keys.device)
        kernels.append(pages, slots, self.keys.transpose(0, 1), self.values.transpose(0, 1), backend=backend)
        full = torch.arange(tokens // page_size, device=slots.device)
        kernels.seal(pages, full, backend=backend)
        if span_pages:
            kernels.seal_spans(pages, full[: len(full) // unit * unit].view(-1, unit), backend=backend)
        return pages

    def coded(self, page_size: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 keys [Hkv, n, D] and values [Hkv, n, Dv], of sealed pages as eight bits give them back."""
        plain = self.paged(page_size, "int8", backend).segments[0]
        full = self.keys.shape[1] // page_size
        codes = self.geometry(page_size, "int8", "int8").allocate(max(full, 1), closed=True)
        pages, every = kernels.Pages((plain, codes)), torch.arange(full, device=self.keys.device)
        kernels.seal(pages, every, plain.keys.shape[1] + every, backend=backend)
        decoded = gather_tokens(pages, plain.keys.shape[1] + every)
        return (
            torch.cat([decoded[0].flatten(1, 2), self.keys[:, full * page_size :].float()], dim=1),
            torch.cat([decoded[1].flatten(1, 2), self.values[:, full * page_size :].float()], dim=1),
        )


class Observed:
    """Decode steps behind a prefilled text, as a dense cache saw them.

    Attributes:
        cache: Holds all tokens, those of the steps included.
        lengths: [R] int64 tokens that each step sees.
    """

    def __init__(self, loaded: LoadedModel, ids: Sequence[int], steps: int, config: QuestConfig, on_progress: Progress):
        """Prefill all but the last `steps` tokens of `ids`, decode these densely, and keep their queries."""
        self._queries: dict[int, list[torch.Tensor]] = {}
        self._softmax: dict[int, Softmax] = {}
        prompt, rest = torch.tensor([ids[:-steps]]), torch.tensor([ids[-steps:]])
        with read_as(loaded.model, len(ids)):
            context = prefill_context(
                loaded.model,
                prompt,
                config,
                observe=False,
                on_progress=lambda done: on_progress(0.9 * done / prompt.shape[1], "prefill"),
            )
            self.cache: QuestCache = context.cache.fork()
            with self.cache.observe(self._keep):
                for step in range(steps):
                    decode(loaded.model, self.cache, rest[:, step : step + 1])
                    on_progress(0.9 + 0.1 * (step + 1) / steps, "decoding")
        self.lengths = torch.arange(len(ids) - steps + 1, len(ids) + 1, device=loaded.model.device)

    @property
    def layers(self) -> list[int]:
        """Layers that were observed: the model's full-attention ones."""
        return sorted(self._queries)

    def steps(self, layer: int) -> LayerSteps:
        """One layer's steps; its keys and values are gathered from the cache now."""
        keys, values = self.cache.keys_values(layer)
        return LayerSteps(layer, torch.cat(self._queries[layer]), keys, values, self.lengths, self._softmax[layer])

    def _keep(self, layer: int, query: torch.Tensor, softmax: Softmax) -> None:
        self._queries.setdefault(layer, []).append(query[0].transpose(0, 1).clone())
        self._softmax[layer] = softmax
