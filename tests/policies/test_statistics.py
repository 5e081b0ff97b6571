"""The prompt's attention statistics against float64, whatever the chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf.tiny_models import build, tokens
from policies.trace import CONFIG, EPS, traces
from questkv import QuestCache, QuestConfig
from questkv.hf.attention import questkv_attention
from questkv.policies import StreamingLLM, prefill_context, statistics
from questkv.policies.statistics import OBSERVED_QUERIES, Statistics, StatisticsCollector

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 8, 0.6


def expected_mass(q: torch.Tensor, k: torch.Tensor, first_query: int) -> torch.Tensor:
    """[Hkv, n] float64, query by query."""
    mass = torch.zeros(KV_HEADS, k.shape[1], dtype=torch.float64)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        for i in range(max(first_query, 0), k.shape[1]):
            weights = (k[kv_head, : i + 1].double() @ q[head, i].double() * SCALE).softmax(dim=0)
            mass[kv_head, : i + 1] += weights / (HEADS // KV_HEADS)
    return mass


def collect(q: torch.Tensor, k: torch.Tensor, chunks: list[int]) -> Statistics:
    """Through a one-layer cache, in chunks."""
    cache = QuestCache(LlamaConfig(num_hidden_layers=1), QuestConfig(token_budget=1.0, sparse_prefill=0))
    collector = StatisticsCollector(cache, k.shape[1])
    at = 0
    with cache.observe(collector):
        for chunk in chunks:
            part = slice(at, at + chunk)
            handle, _ = cache.update(k[None, :, part], k[None, :, part], 0)
            questkv_attention(torch.nn.Module().eval(), q[None, :, part], handle, handle, None, scaling=SCALE)
            at += chunk
    assert at == k.shape[1]
    return collector.statistics[0]


@pytest.mark.parametrize("length", [20, 75])
@pytest.mark.parametrize("block", [1, 300, 2**20])
@pytest.mark.parametrize("chunk", [1, 13, 100])
def test_mass_is_the_sum_of_every_querys_weights(monkeypatch: Any, length: int, block: int, chunk: int) -> None:
    monkeypatch.setattr(statistics, "_BLOCK_LOGITS", block)
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(HEADS, length, DIM, generator=generator)
    k = torch.randn(KV_HEADS, length, DIM, generator=generator)
    starts = range(0, length, chunk)
    found = collect(q, k, [min(chunk, length - start) for start in starts])
    # A logit is off by (D + 4) eps |q||k| and so a weight by twice that, relatively; the sums add (T + n) eps.
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * SCALE
    relative = EPS * (2 * (DIM + 4) * largest + 2 * (length + 8))
    for name, first in (("accumulated", 0), ("window", length - OBSERVED_QUERIES), ("last", length - 1)):
        mass, expected = getattr(found, name), expected_mass(q, k, first)
        assert mass.dtype == torch.float32
        assert ((mass - expected).abs() <= relative * expected).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "llama-mixed"])
def test_statistics_of_a_model_honour_its_softmax(name: str) -> None:
    _, context, found = traces(name, StreamingLLM(budget=8, dense_layers=0), 41, 1)
    assert sorted(context.statistics) == sorted(found) == list(context.paged_layers)
    for layer, trace in found.items():
        largest = float(trace.queries.norm(dim=-1).max() * trace.keys.norm(dim=-1).max()) * trace.softmax.scale
        relative = EPS * (2 * (trace.keys.shape[2] + 4) * largest + 2 * (41 + 8))
        for head in range(trace.kv_heads):
            expected = trace.prompt_mass(head, 0)
            assert ((context.statistics[layer].accumulated[head] - expected).abs() <= relative * expected).all()


def test_without_observation_there_are_none() -> None:
    context = prefill_context(build("llama", "questkv"), tokens(1, 9), CONFIG, observe=False)
    assert context.statistics == {}
