"""What the prompt's attention looked like: the statistics that the eviction methods start from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from questkv.hf.cache import QuestCache
from questkv.kernels import Softmax

# Last queries of the prompt that SnapKV observes (its paper's LongBench settings).
OBSERVED_QUERIES = 32
# Logits that are held at once, float32 (4 MiB): large enough for fast products, small enough for a CPU's cache.
_BLOCK_LOGITS = 2**20


@dataclass(frozen=True, eq=False)
class Statistics:
    """Attention mass of a prompt's n tokens in one layer, the mean over the query heads of each KV head.

    Attributes:
        accumulated: [Hkv, n] float32 on the CPU, summed over all queries of the prompt.
        window: [Hkv, n], summed over the last `OBSERVED_QUERIES` queries.
        last: [Hkv, n], of the last query.
    """

    accumulated: torch.Tensor
    window: torch.Tensor
    last: torch.Tensor


class StatisticsCollector:
    """Observer of a `QuestCache` during the prefill of one prompt (`QuestCache.observe`).

    Args:
        cache: The cache that is observed.
        length: n, tokens of the prompt.

    Attributes:
        statistics: By paged layer; complete once the prompt is.
    """

    def __init__(self, cache: QuestCache, length: int) -> None:
        self.statistics: dict[int, Statistics] = {}
        self._cache = cache
        self._length = length

    def __call__(self, layer: int, query: torch.Tensor, softmax: Softmax) -> None:
        """Add the mass of [1, Hq, n', D] new queries."""
        keys, _ = self._cache.keys_values(layer)
        seen = keys.shape[1]
        if layer not in self.statistics:
            self.statistics[layer] = Statistics(*(torch.zeros(len(keys), self._length) for _ in range(3)))
        of_layer = self.statistics[layer]
        # The queries that the observation window shares with this chunk are its last ones.
        in_window = min(seen - self._length + OBSERVED_QUERIES, query.shape[2])
        parts = [(of_layer.accumulated, query.shape[2]), (of_layer.window, in_window)]
        if seen == self._length:
            parts.append((of_layer.last, 1))
        for total, count in parts:
            if count > 0:
                total[:, :seen] += attention_mass(query[0, :, -count:], keys, softmax).cpu()


def attention_mass(query: torch.Tensor, keys: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Causal attention mass of each token, summed over queries.

    Args:
        query: [Hq, n, D], the last n of T tokens.
        keys: [Hkv, T, D].
        softmax: Scale, soft cap and sinks.

    Returns:
        [Hkv, T] float32, the mean over each KV head's query heads.
    """
    (kv_heads, tokens, dim), n = keys.shape, query.shape[1]
    grouped = query.float().view(kv_heads, -1, n, dim) * softmax.scale  # [Hkv, G, n, D]
    group = grouped.shape[1]
    sinks = None if softmax.sinks is None else softmax.sinks.float().view(kv_heads, group, 1)
    rows = max(1, min(n, _BLOCK_LOGITS // (group * tokens)))
    buffer = grouped.new_empty(group * rows * (tokens + 1))
    mass: torch.Tensor = grouped.new_zeros(kv_heads, tokens)
    for head in range(kv_heads):
        transposed = keys[head].float().t()
        for start in range(0, n, rows):
            block = grouped[head, :, start : start + rows]
            visible = tokens - n + start + block.shape[1]
            mass[head, :visible] += _block_mass(
                block, transposed[:, :visible], softmax.softcap, None if sinks is None else sinks[head], buffer
            )
    return mass.div_(group)


def _block_mass(
    query: torch.Tensor, keys: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None, buffer: torch.Tensor
) -> torch.Tensor:
    """[T] mass of [G, n, D] scaled queries on [D, T] keys, the last n of them the queries' own.

    Everything happens in `buffer`: fresh memory for each block would cost as much as the arithmetic.
    """
    (group, n, dim), tokens = query.shape, keys.shape[1]
    width = tokens if sinks is None else tokens + 1
    logits = buffer[: group * n * width].view(group, n, width)
    torch.mm(query.reshape(-1, dim), keys, out=logits.flatten(0, 1)[:, :tokens])
    if softcap is not None:
        logits[..., :tokens].div_(softcap).tanh_().mul_(softcap)
    # A query sees no token behind its own.
    hidden = torch.ones(n, n, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., tokens - n : tokens].masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        logits[..., tokens] = sinks
    torch.softmax(logits, dim=-1, out=logits)
    return logits.sum(dim=(0, 1))[:tokens]
