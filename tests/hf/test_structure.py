"""Structure: what a compiled step sees of a model that changed after it was compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf.tiny_models import build
from questkv.hf.compile.structure import Structure
from questkv.hf.linear_layers import fast_linear_layers


def replace_parameter(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())


def shorten_in_place(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone()[:-1]


def set_config(model: Any) -> None:
    model.config.output_hidden_states = True


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.train(),
        lambda model: model.bfloat16(),
        lambda model: model.model.norm.half(),
        lambda model: model.set_submodule("lm_head", torch.nn.Linear(8, 8)),
        lambda model: setattr(model.lm_head, "__class__", type("Other", (torch.nn.Linear,), {})),
        replace_parameter,
        shorten_in_place,
        set_config,
    ],
)
def test_a_change_in_the_model_is_seen(change: Callable[[Any], Any]) -> None:
    model = build("llama", "questkv")
    structure = Structure(model)
    assert structure.is_of(model)
    change(model)
    assert not structure.is_of(model)
    assert Structure(model).is_of(model)


def test_numbers_in_weights_are_no_structure() -> None:
    model = build("llama", "questkv")
    structure = Structure(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert structure.is_of(model)


def test_layers_made_fast_and_back_are_known_again() -> None:
    model = build("llama", "questkv")
    plain = Structure(model)
    with fast_linear_layers(model) as count:
        assert count
        assert not plain.is_of(model)
        fast = Structure(model)
    assert plain.is_of(model)
    assert not fast.is_of(model)


def test_the_model_is_not_kept_alive() -> None:
    model = build("llama", "questkv")
    structure, gone = Structure(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert structure is not None
