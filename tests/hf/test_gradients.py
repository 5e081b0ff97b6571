"""A backward pass through the paged attention is an error, never zeros; a forward without one needs no `no_grad`."""

from __future__ import annotations

import pytest
import torch

from hf.tiny_models import pair, tokens
from questkv import QuestConfig
from questkv.errors import UnsupportedError

FULL = QuestConfig(token_budget=1.0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_backward_to_the_input_is_refused(name: str) -> None:
    models, ids = pair(name), tokens(1, 20)
    embeddings = models.quest.get_input_embeddings()(ids).detach().requires_grad_()
    logits = models.quest(inputs_embeds=embeddings, cache=models.cache(FULL)).logits
    with pytest.raises(UnsupportedError, match=r"\[questkv\] backward: expected no gradients"):
        logits[0, -1, 5].backward()
    assert embeddings.grad is None


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_backward_to_one_projection_is_refused(part: str) -> None:
    """Adapters train a part of the model; the gradient of each part goes through the attention."""
    models, ids = pair("llama"), tokens(1, 20)
    wants = {name: weight.requires_grad for name, weight in models.quest.named_parameters()}
    try:
        for name, weight in models.quest.named_parameters():
            weight.requires_grad_(name == f"model.layers.0.self_attn.{part}.weight")
        logits = models.quest(ids, cache=models.cache(FULL)).logits
        with pytest.raises(UnsupportedError, match="backward"):
            logits.sum().backward()
    finally:
        for name, weight in models.quest.named_parameters():
            weight.requires_grad_(wants[name])


def test_backward_that_needs_no_attention_is_right() -> None:
    """The last linear layer's gradient doesn't pass through attention."""
    models, ids = pair("llama"), tokens(1, 20)
    head = models.quest.lm_head.weight
    logits = models.quest(ids, cache=models.cache(FULL)).logits
    (got,) = torch.autograd.grad(logits.sum(), head)
    (expected,) = torch.autograd.grad(models.reference(ids).logits.sum(), models.reference.lm_head.weight)
    assert torch.allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_a_decode_step_with_gradients_enabled_gives_the_same_logits() -> None:
    models, ids = pair("llama"), tokens(1, 20)
    with_gradients, without = models.cache(FULL), models.cache(FULL)
    got = [models.quest(part, cache=with_gradients).logits for part in ids.split([19, 1], dim=1)]
    with torch.no_grad():
        expected = [models.quest(part, cache=without).logits for part in ids.split([19, 1], dim=1)]
    assert torch.equal(torch.cat(got, dim=1), torch.cat(expected, dim=1))
