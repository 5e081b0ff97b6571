"""Masks that aren't plain causal: an image's tokens that see one another, packed rows, masks of a caller's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from hf.tiny_models import build, pair, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import UnsupportedError

EVERYTHING = QuestConfig(token_budget=1.0, page_size=4)
SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)
IMAGE, BEGIN, END, PER_IMAGE = 120, 121, 122, 4


@pytest.fixture(scope="module")
def gemma() -> Any:
    """A tiny Gemma 3 with a vision tower, and weights under which attention matters."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 128, "sliding_window": 9, "query_pre_attn_scalar": 8}
    config = Gemma3Config(
        text_config=small | text | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config=small | {"image_size": 28, "patch_size": 7},
        mm_tokens_per_image=PER_IMAGE,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.0 if "emb" in name else 1.5 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def logits_and_tokens(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[list[int]]]:
    """The prompt's logits at real tokens, and what greedy generation adds."""
    mask = inputs["attention_mask"]
    with torch.no_grad():
        logits = model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[mask.bool()]
    out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    return logits, out[:, mask.shape[1] :].tolist()


def with_images(padded: bool) -> dict[str, torch.Tensor]:
    """Two rows of 40 tokens with two images each, the second padded by 5 tokens on the left."""
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    for start in (12, 28):
        ids[:, start - 1], ids[:, start + PER_IMAGE] = BEGIN, END
        ids[:, start : start + PER_IMAGE] = IMAGE
    if padded:
        ids[1, :5] = mask[1, :5] = 0
    pixels = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": (ids == IMAGE).long(),
        "pixel_values": pixels,
    }


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_text_with_token_types_of_zeros_is_plain_text(gemma: Any) -> None:
    ids = tokens(2, 40)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    expected = logits_and_tokens(gemma, inputs)
    with attach(gemma, EVERYTHING) as attached:
        got = logits_and_tokens(gemma, inputs)
        assert attached.cache.report().tokens == (45, 45)
    assert close(got[0], expected[0])
    assert got[1] == expected[1]


@pytest.mark.parametrize("padded", [False, True])
def test_an_images_tokens_see_one_another(gemma: Any, padded: bool) -> None:
    inputs = with_images(padded)
    expected = logits_and_tokens(gemma, inputs)
    causal = logits_and_tokens(gemma, inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])})
    assert not close(causal[0], expected[0])
    with attach(gemma, EVERYTHING) as attached:
        got = logits_and_tokens(gemma, inputs)
        assert attached.cache.report().tokens == ((45, 40) if padded else (45, 45))
    assert close(got[0], expected[0])
    assert got[1] == expected[1]
    with attach(gemma, SPARSE) as attached:
        logits_and_tokens(gemma, inputs)
        assert attached.cache.report().share_read < 0.6


@pytest.mark.parametrize("past", [0, 17])
def test_a_mask_of_the_callers_own_is_read_densely(past: int) -> None:
    models, ids = pair("llama"), tokens(2, 40)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    mask[25:, 3:9] = False  # later tokens don't see some
    mask[20:24, 20:24] = True  # and four see one another
    mask = mask.expand(2, 1, 40, 40)
    cache = models.cache(EVERYTHING)
    with torch.no_grad():
        expected = models.reference(ids, attention_mask=mask).logits
        parts = [models.quest(ids[:, :past], cache=cache).logits] if past else []
        parts.append(models.quest(ids[:, past:], attention_mask=mask[:, :, past:], cache=cache).logits)
    assert close(torch.cat(parts, dim=1), expected)
    assert cache.report().tokens == (40, 40)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.zeros(1, 1, 9, 9), "got torch.float32"),
        (torch.ones(1, 6, 9, 9, dtype=torch.bool), "that all heads share"),
        (torch.ones(1, 1, 1, 9, dtype=torch.bool), r"\[1, 1, 1, 9\]"),
        (torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1), "every token to see itself"),
    ],
)
def test_a_mask_that_pages_cant_have_is_refused(mask: torch.Tensor, said: str) -> None:
    models, cache = pair("llama"), pair("llama").cache(SPARSE)
    with pytest.raises(UnsupportedError, match=said), torch.no_grad():
        models.quest(tokens(1, 9), attention_mask=mask, cache=cache)
    assert sum(cache.report().tokens) == 0


def test_a_step_that_hides_a_cached_token_is_refused() -> None:
    models, cache = pair("llama"), pair("llama").cache(SPARSE)
    mask = torch.ones(1, 1, 1, 10, dtype=torch.bool)
    mask[..., 3] = False
    with torch.no_grad():
        models.quest(tokens(1, 9), cache=cache)
        with pytest.raises(UnsupportedError, match="cached tokens' mask unchanged"):
            models.quest(tokens(1, 1), attention_mask=mask, cache=cache)
    assert cache.report().tokens == (9,)


def test_new_tokens_are_read_as_they_came_where_pages_hold_eight_bits() -> None:
    model, ids = build("llama", "questkv"), tokens(1, 40)
    config = QuestConfig(token_budget=1.0, page_size=4, kv_dtype="int8")
    causal = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    plain, masked = QuestCache(model.config, config), QuestCache(model.config, config)
    with torch.no_grad():
        expected = model(ids, cache=plain).logits
        # The same mask, but for one bit that no token but the last can feel.
        causal[0, 0, 39, 0] = False
        got = model(ids, attention_mask=causal, cache=masked).logits
    assert torch.equal(got[:, :39], expected[:, :39])
    assert not close(got[:, 39], expected[:, 39])
