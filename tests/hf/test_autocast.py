"""Under autocast queries and keys come in float32 and values in a narrower type; SDPA casts all three, and so do we."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf.tiny_models import HYBRID, pair, tokens
from questkv import QuestConfig, attach

FULL = QuestConfig(token_budget=1.0)
NAMES = ("llama", "llama-mixed", "qwen3", "gemma3", "gemma2")


def logits_of(model: Any, ids: torch.Tensor, dtype: torch.dtype, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return torch.cat([model(part, **kwargs).logits for part in ids.split([25, 1, 1, 13], dim=1)], dim=1).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_near_to_float64_as_transformers_own(name: str, dtype: torch.dtype) -> None:
    models, ids = pair(name), tokens(2, 40)
    got = logits_of(models.quest, ids, dtype, cache=models.cache(FULL))
    with torch.no_grad():
        truth = models.reference.double()(ids).logits
        models.reference.float()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        own = models.reference(ids).logits.double()
    # Twice transformers' own error in this type: its rounding is as random as ours.
    assert (got - truth).square().mean() <= 4 * (own - truth).square().mean()


def test_pages_hold_the_narrow_type() -> None:
    models, ids = pair("llama"), tokens(1, 40)
    cache = models.cache(FULL)
    logits_of(models.quest, ids, torch.bfloat16, cache=cache)
    keys, values = cache.keys_values(0)
    assert keys.dtype == values.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HYBRID])
def test_a_sparse_step_under_autocast_reads_fewer_pages(name: str) -> None:
    model = pair(name).quest
    config = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)
    with attach(model, config) as attached, torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(tokens(1, 60), max_new_tokens=4, do_sample=False)
        assert attached.cache is not None
        report = attached.cache.report()
    assert 0 < report.pages_read < report.pages_held
