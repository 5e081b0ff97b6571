"""The compiled decode step as inductor builds it: the uncompiled step's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf.tiny_models import pair, tokens
from questkv import QuestConfig, attach
from questkv.hf.compile import graph
from questkv.models import LoadedModel

SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1)


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    graph._steps.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    graph._steps.clear()
    torch._dynamo.reset()


def greedy(model: Any, ids: torch.Tensor, count: int, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, **kwargs)
    return out[:, ids.shape[1] :]


def graphs() -> int:
    """Graphs compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_its_code_gives_the_uncompiled_tokens() -> None:
    models, ids = pair("llama"), tokens(2, 30)
    expected = greedy(models.quest, ids, 40, cache=models.cache(SPARSE))
    with attach(models.quest, SPARSE, compile=True), torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(greedy(models.quest, ids, 40), expected)
    assert graphs() == 1


@pytest.mark.slow
def test_smollm2_gives_the_uncompiled_tokens(smollm2: LoadedModel) -> None:
    ids = torch.tensor(
        [smollm2.tokenizer("The pass key is 71432. " * 40 + "What is the pass key? The pass")["input_ids"]]
    )
    config = QuestConfig(token_budget=128)
    expected = {}
    for compile_it in (False, True):
        with attach(smollm2.model, config, compile=compile_it) as attached:
            mask = torch.ones_like(ids)
            expected[compile_it] = greedy(smollm2.model, ids, 48, attention_mask=mask, pad_token_id=2)
            assert attached.cache.report().share_read < 1
    assert torch.equal(expected[True], expected[False])
    assert graphs() == 1
