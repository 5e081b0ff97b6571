"""Forks of one cache that are decoded in several threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hf.tiny_models import pair, teacher_forced, tokens
from questkv import QuestCache, QuestConfig
from questkv.pages import geometry

BASE = QuestConfig(token_budget=16, page_size=2, sink_tokens=4, recent_tokens=4, dense_layers=1)
CONFIGS = {
    "plain pages": BASE,
    "pages in eight bits": replace(BASE, kv_dtype="int8"),
    "spans": replace(BASE, span_pages=2),
    "pages in host memory": replace(BASE, offload="host", offload_cache=1.0, backend="reference"),
}
STEPS = 40


@pytest.fixture(autouse=True)
def many_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads take turns at every chance; host memory and the device are both the CPU's."""
    monkeypatch.setattr(geometry, "_host_without_gpu", True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", CONFIGS)
def test_forks_in_threads_decode_what_they_decode_alone(name: str) -> None:
    models = pair("llama")
    cache = models.cache(CONFIGS[name])
    teacher_forced(models.quest, tokens(2, 33), cache, [33])
    texts = [tokens(2, STEPS, seed=seed) for seed in (1, 2, 3)]

    def decode(fork: QuestCache, text: torch.Tensor) -> torch.Tensor:
        return teacher_forced(models.quest, text, fork, [1] * STEPS)

    alone = [decode(cache.fork(), text) for text in texts]
    forks = [cache.fork() for _ in texts]
    found: dict[int, torch.Tensor] = {}
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            with torch.inference_mode():
                found[number] = decode(forks[number], texts[number])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number in range(3):
        assert torch.equal(found[number], alone[number])
    (pool,) = {id(group.pool): group.pool for group in cache.state.groups.values()}.values()
    for fork in (*forks, cache):
        fork.reset()
    assert pool.num_free == pool.num_pages
