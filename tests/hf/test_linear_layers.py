"""Fast linear layers: which layers, for how many rows, and a model that is as it was after."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf.tiny_models import build, pair, teacher_forced, tokens
from questkv import QuestConfig, attach, kernels
from questkv.hf import linear_layers
from questkv.hf.linear_layers import MOST_ROWS, fast_linear_layers

pytestmark = pytest.mark.skipif("native" not in kernels.available_backends(), reason="the compiled module isn't built")
SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=1)


class Calls:
    """How many rows each call of `kernels.linear` got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        own = kernels.linear

        def counted(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            self.rows.append(x.numel() // x.shape[-1])
            return own(x, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(linear_layers.kernels, "linear", counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_agrees_with_pytorchs_layers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("llama", "questkv").to(dtype), tokens(2, 50)
    expected = teacher_forced(model, ids, pair("llama").cache(SPARSE), [40, *[1] * 10])
    calls = Calls(monkeypatch)
    with attach(model, fast_linear=True):
        got = teacher_forced(model, ids, pair("llama").cache(SPARSE), [40, *[1] * 10])
    assert calls.rows == [2] * 10 * (3 * 7 + 1)
    # float32: another order of sums. bfloat16: each of 22 layers rounds a value to the other neighbour now and then.
    size = float(expected.abs().max())
    assert float((got - expected).abs().max()) <= 64 * torch.finfo(dtype).eps * size


def test_many_rows_gradients_and_strides_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, layer = Calls(monkeypatch), nn.Linear(8, 4)
    with fast_linear_layers(layer) as count:
        assert count == 1
        assert isinstance(layer, nn.Linear)
        layer(torch.randn(1, 8)).sum().backward()
        assert layer.weight.grad is not None
        with torch.no_grad():
            layer(torch.randn(MOST_ROWS + 1, 8))
            layer(torch.randn(8, 2).T)
            assert calls.rows == []
            layer(torch.randn(MOST_ROWS, 8))
    assert calls.rows == [MOST_ROWS]
    assert type(layer) is nn.Linear


def test_other_layers_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    replaced = nn.Linear(8, 8)
    replaced.forward = lambda x: x  # type: ignore[method-assign,assignment]
    model = nn.Sequential(Own(8, 8), replaced, nn.Linear(8, 8).double(), nn.Linear(8, 8), nn.Embedding(8, 8))
    with fast_linear_layers(model) as count:
        assert count == 1
        assert [type(layer) is nn.Linear for layer in model[:4]] == [False, True, True, False]
    assert [type(layer) for layer in model[:4]] == [Own, nn.Linear, nn.Linear, nn.Linear]


def test_the_layers_are_put_back_after_an_error() -> None:
    model = build("llama", "questkv")
    with pytest.raises(KeyboardInterrupt), attach(model, fast_linear=True):
        raise KeyboardInterrupt
    assert all(type(module) is not linear_layers._FastLinear for module in model.modules())


def test_without_the_compiled_module_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available_backends", lambda: ("reference",))
    with fast_linear_layers(nn.Linear(8, 8)) as count:
        assert count == 0
