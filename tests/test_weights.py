"""Light weights: what the codes stand for, what the products are, and what stays as it was."""

from __future__ import annotations

import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from questkv import QuestCache, QuestConfig
from questkv.errors import ConfigError, MissingPackageError, ModelError, UnsupportedError
from questkv.models import LoadedModel, load_model
from questkv.weights import GROUP_SIZE, Int4Linear, Int8Linear, lighten

pytest.importorskip("torchao", reason="light weights are made by torchao")

NOVEL = Path(__file__).parents[1] / "examples" / "sherlock_holmes.txt"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def tiny(*, tied: bool = True, hidden: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        tie_word_embeddings=tied,
        attn_implementation="questkv",
    )
    return LlamaForCausalLM(config).eval()


def decoded(layer: Int8Linear | Int4Linear) -> torch.Tensor:
    """[out, in] float64 weights that a layer stands for; in four bits read off its products with unit vectors."""
    if isinstance(layer, Int8Linear):
        return layer.codes.double() * layer.scales.double()[:, None]
    products = layer(torch.eye(layer.in_features, dtype=layer.scales_and_zeros.dtype)).double()
    return (products if layer.bias is None else products - layer.bias.double()).T


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_are_off_by_at_most_half_a_step(dtype: torch.dtype) -> None:
    source = linear(67, 23, dtype)
    layer = Int8Linear(source)
    weight = source.weight.double()
    # torchao's steps are a 127.5th of the row's largest weight; the step itself is rounded to the dtype, so the largest
    # code may be cut by 127 roundings of a step, and half a step more for its odd half
    step = weight.abs().amax(dim=1, keepdim=True) / 127.5
    allowed = step * (0.5 + 127.5 * torch.finfo(dtype).eps + 0.01)
    assert ((decoded(layer) - weight).abs() <= allowed).all()
    assert layer.codes.dtype == torch.int8


def test_four_bits_are_off_by_at_most_half_a_step_of_their_group() -> None:
    source = linear(3 * GROUP_SIZE, 32, torch.float32)
    layer = Int4Linear(source)
    weight = source.weight.double().unflatten(1, (3, GROUP_SIZE))
    step = (weight.amax(dim=2) - weight.amin(dim=2)) / 15
    error = (decoded(layer).unflatten(1, (3, GROUP_SIZE)) - weight).abs().amax(dim=2)
    # torch's packing stores scale and zero in the weights' type, here float32
    assert (error <= step * 0.5 + 1e-6).all()
    assert layer.codes.element_size() * layer.codes.numel() == 3 * GROUP_SIZE * 32 // 2


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 70])
def test_products_are_those_of_the_decoded_weights(kind: type[Int8Linear], dtype: torch.dtype, rows: int) -> None:
    source = linear(2 * GROUP_SIZE, 48, dtype, bias=True)
    layer = kind(source)
    x = torch.randn(2, 2 * rows, 2 * GROUP_SIZE, dtype=dtype)[:, ::2]
    weights = decoded(layer)
    expected = x.double() @ weights.T + source.bias.double()
    # Every weight may be rounded to the dtype once and so may the product and its sum with the bias; sums are float32.
    eps = torch.finfo(dtype).eps
    allowed = eps * (x.double().abs() @ weights.abs().T + 2 * expected.abs() + source.bias.double().abs()) + 1e-5
    out = layer(x)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_all_linear_layers_are_coded_and_nothing_else(weights: str, tied: bool) -> None:
    model = tiny(tied=tied)
    embedding = model.get_input_embeddings().weight
    before = embedding.clone()
    lighten(model, weights)
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    inner = {type(module) for name, module in model.model.named_modules() if name.endswith("_proj")}
    assert inner == {Int4Linear if weights == "int4" else Int8Linear}
    # errors of the output layer go straight into the logits
    assert type(model.get_output_embeddings()) is Int8Linear
    assert model.get_input_embeddings().weight is embedding
    assert torch.equal(embedding, before)


def test_a_layer_that_four_bits_do_not_divide_has_eight() -> None:
    model = tiny(hidden=48)
    lighten(model, "int4")
    layers = dict(model.named_modules())
    assert type(layers["model.layers.0.self_attn.q_proj"]) is Int8Linear
    assert type(layers["model.layers.0.mlp.down_proj"]) is Int4Linear


def test_the_weights_that_were_coded_are_dropped() -> None:
    model = tiny()
    weight = weakref.ref(model.model.layers[1].mlp.up_proj.weight)
    lighten(model, "int8")
    assert weight() is None


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_light_model_is_the_model_with_the_decoded_weights(weights: str) -> None:
    light, plain = tiny(tied=False), tiny(tied=False)
    plain.load_state_dict(light.state_dict())
    lighten(light, weights)
    layers = dict(light.named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            if type(module) is nn.Linear:
                module.weight.copy_(decoded(layers[name]))
    ids = torch.randint(0, 96, (1, 90))
    with torch.no_grad():
        logits, expected = (model(ids, cache=QuestCache(model.config)).logits for model in (light, plain))
    # float32 throughout: what remains is the order of some thousand sums, in two layers
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    everything = light.generate(ids, cache=QuestCache(light.config, QuestConfig(token_budget=1.0)), **kwargs)
    enough = light.generate(ids, cache=QuestCache(light.config, QuestConfig(token_budget=160)), **kwargs)
    assert torch.equal(everything, enough)


def test_without_torchao_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(MissingPackageError, match=r"--weights int8: expected torchao; install it: pip install"):
        lighten(tiny(), "int8")


def test_a_torchao_without_four_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.prototype.quantization.int4", None)
    with pytest.raises(MissingPackageError, match=r"--weights int4: .*pip install 'torchao>=0\.18'"):
        lighten(tiny(), "int4")


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="expected a model on the CPU, got meta"):
        lighten(tiny().to("meta"), "int8")
    light = tiny()
    lighten(light, "int8")
    with pytest.raises(UnsupportedError, match="expected a model with linear layers"):
        lighten(light, "int8")
    quantised = tiny()
    quantised.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedError, match="got a quantised checkpoint"):
        lighten(quantised, "int4")


def test_load_model_refuses_other_types() -> None:
    with pytest.raises(ConfigError, match="weights: expected one of model, int8, int4, got int3"):
        load_model(weights="int3")


@pytest.mark.parametrize(("method", "package"), [("gptq", "optimum"), ("awq", "gptqmodel")])
def test_quantised_checkpoints_are_left_to_transformers(tmp_path: Path, method: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed, and what is tested is the message without it")
    model = tiny()
    model.config.quantization_config = {"quant_method": method, "bits": 4, "group_size": 32}
    model.config.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    with pytest.raises((MissingPackageError, ModelError), match=rf"model .*{package}"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.slow
def test_eight_bits_cost_less_than_a_hundredth_of_perplexity() -> None:
    def loss(loaded: LoadedModel) -> float:
        ids = torch.tensor(loaded.tokenizer(NOVEL.read_text(encoding="utf-8"))["input_ids"])
        windows = torch.stack([ids[start : start + 1000] for start in (3000, 20000, 40000)])
        with torch.inference_mode():
            logits = loaded.model(windows).logits[:, 100:-1].float()
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 101:].flatten()))

    plain, eight = (loss(load_model(dtype="float32", weights=weights)) for weights in ("model", "int8"))
    # perplexity is the exponential of the loss
    assert abs(eight - plain) < 0.01
