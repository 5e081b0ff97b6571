"""`attach`: a model decodes with questkv inside the block and is as it was after it."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch._dynamo.exc import TorchDynamoException
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

from hf.tiny_models import NAMES, VOCABULARY, build, pad_left, tokens
from questkv import QuestCache, QuestConfig, attach
from questkv.errors import CacheMismatchError, UnsupportedError

SPARSE = QuestConfig(token_budget=16, page_size=4, sink_tokens=4, recent_tokens=4, dense_layers=0)
EVERYTHING = QuestConfig(token_budget=1.0, page_size=4)


def greedy(model: Any, ids: torch.Tensor, **kwargs: Any) -> list[list[int]]:
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8} | kwargs
    return model.generate(ids, **settings)[:, ids.shape[1] :].tolist()


def everything_about(model: Any) -> list[Any]:
    """Whatever `attach` could leave behind."""
    found: list[Any] = [model.generation_config.to_dict(), model.config.to_dict()]
    for module in model.modules():
        # Plain attributes, and the keys of hook tables; parameters and submodules stay the objects they are.
        plain = {key: value for key, value in module.__dict__.items() if not isinstance(value, dict)}
        tables = {
            key: {name: id(entry) for name, entry in value.items()}
            for key, value in module.__dict__.items()
            if isinstance(value, dict)
        }
        config = getattr(module, "config", None)
        attention = [getattr(config, f"_attn_implementation{end}", None) for end in ("", "_internal")]
        found.append((sorted(plain), tables, attention, module.training))
    return found


# Not the model whose first layer was replaced: its config is not the model's.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama-mixed"])
def test_generation_inside_uses_pages_and_outside_is_as_before(name: str) -> None:
    model = build(name, "sdpa" if name not in ("gemma2", "gpt-oss") else "eager")
    ids, before = tokens(2, 40), everything_about(model)
    expected = greedy(model, ids)
    with attach(model, EVERYTHING) as attached:
        assert model.config._attn_implementation == "questkv"
        assert greedy(model, ids) == expected
        assert attached.cache.report().tokens == (47, 47)
    with attach(model, SPARSE) as attached:
        greedy(model, ids)
        assert attached.cache.report().share_read < 0.5
        assert attached.cache.config == SPARSE
    assert everything_about(model) == before
    assert greedy(model, ids) == expected


def test_a_model_is_as_it_was_after_an_exception() -> None:
    model = build("llama", "sdpa")
    before = everything_about(model)
    with pytest.raises(KeyboardInterrupt), attach(model, SPARSE):
        raise KeyboardInterrupt
    assert everything_about(model) == before
    with pytest.raises(AttributeError), attach(model, SPARSE):
        model.generate("no tensor")
    assert everything_about(model) == before


def test_a_wrong_configuration_is_refused_before_anything_is_changed() -> None:
    model = build("llama", "sdpa")
    before = everything_about(model)
    with pytest.raises(TypeError, match="expected a QuestConfig, got dict"), attach(model, {"token_budget": 0.5}):
        pass
    assert everything_about(model) == before


def test_an_inner_attachment_counts_inside_and_the_outer_one_after() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    before = everything_about(model)
    with attach(model, SPARSE) as outer:
        greedy(model, ids)
        between, first = everything_about(model), outer.cache
        with attach(model, EVERYTHING) as inner:
            greedy(model, ids)
            assert inner.cache.report().share_read == 1.0
            used, inner.cache = inner.cache, None
            with torch.no_grad():
                model(ids)
            assert inner.cache is not None
            assert inner.cache is not used
            assert outer.cache is first
        assert everything_about(model) == between
        greedy(model, ids)
        assert outer.cache is not first
        assert outer.cache.report().share_read < 0.5
    assert everything_about(model) == before


@pytest.mark.parametrize("first_out", [0, 1, 2])
def test_attachments_may_end_in_any_order(first_out: int) -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    before, expected = everything_about(model), greedy(model, ids)
    kinds: list[dict[str, Any]] = [{}, {"fast_linear": True}, {"fast_linear": True}]
    blocks = [attach(model, QuestConfig(token_budget=1.0, page_size=3 + i), **kind) for i, kind in enumerate(kinds)]
    attached = [block.__enter__() for block in blocks]
    left = list(range(3))
    for out in (first_out, (first_out + 2) % 3, (first_out + 1) % 3):
        blocks[out].__exit__(None, None, None)
        left.remove(out)
        assert greedy(model, ids) == expected
        for i in left:
            assert (attached[i].cache is not None) == (i == left[-1])
            attached[i].cache = None
        assert any(
            type(part) is not torch.nn.Linear for part in model.modules() if isinstance(part, torch.nn.Linear)
        ) == (any(kinds[i] for i in left))
    assert everything_about(model) == before


def test_a_call_belongs_to_the_attachment_of_its_own_thread() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    before, expected = everything_about(model), greedy(model, ids)
    inside, go_on = threading.Barrier(2), threading.Barrier(2)
    found: dict[str, list[Any]] = {}

    def work(name: str, config: QuestConfig, leaves_first: bool) -> None:
        with attach(model, config) as attached:
            inside.wait()
            found[name] = [greedy(model, ids), attached.cache.config, attached.cache.report().tokens]
            if not leaves_first:
                go_on.wait()
        if leaves_first:
            go_on.wait()

    configs = {name: QuestConfig(token_budget=1.0, page_size=size) for name, size in (("one", 3), ("other", 5))}
    threads = [threading.Thread(target=work, args=(name, config, name == "one")) for name, config in configs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [expected, config, (47,)] for name, config in configs.items()}
    assert everything_about(model) == before


def test_a_thread_without_an_attachment_uses_the_latest() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    with attach(model, SPARSE) as outer, attach(model, EVERYTHING) as inner:
        thread = threading.Thread(target=greedy, args=(model, ids))
        thread.start()
        thread.join()
        assert outer.cache is None
        assert inner.cache.report().tokens == (47,)


def test_an_attachment_that_fails_leaves_those_that_are_there() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    model.forward = model.forward
    before = everything_about(model)
    with attach(model, EVERYTHING) as attached:
        between = everything_about(model)
        with (
            pytest.raises(UnsupportedError, match=r"\[attach\] compile"),
            attach(model, compile=True, fast_linear=True),
        ):
            pass
        assert everything_about(model) == between
        greedy(model, ids)
        assert attached.cache.report().tokens == (47,)
    assert everything_about(model) == before


def test_what_was_kept_of_an_attachment_generates_as_the_model_does() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    expected = greedy(model, ids)
    with attach(model, SPARSE):
        kept = model.generate
    assert kept(ids, do_sample=False, max_new_tokens=8)[:, 40:].tolist() == expected


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_an_attached_model_is_not_copied(take: Any) -> None:
    model = build("llama", "sdpa")
    with (
        attach(model, SPARSE),
        pytest.raises(UnsupportedError, match=r"\[attach\] copy: expected a LlamaForCausalLM that"),
    ):
        take(model)
    other = copy.deepcopy(model)
    assert greedy(other, tokens(1, 20)) == greedy(model, tokens(1, 20))


def without_cache(where: str, model: Any) -> dict[str, Any]:
    """A call's arguments, after `use_cache=False` was said in one place."""
    if where == "argument":
        return {"use_cache": False}
    if where == "generation config":
        return {"generation_config": GenerationConfig(use_cache=False, pad_token_id=0)}
    if where == "model's generation config":
        model.generation_config.use_cache = False
    if where == "model's config":
        model.config.use_cache = False
    if where == "copy of the model's":
        model.generation_config.use_cache = False
        return {"generation_config": copy.deepcopy(model.generation_config)}
    return {}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("where", ["argument", "generation config"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_call_that_says_so_runs_without_a_cache(name: str, where: str) -> None:
    model = build(name, "eager" if name in ("gemma2", "gpt-oss") else "sdpa")
    ids, mask = pad_left([tokens(33), tokens(20, seed=1)])
    expected = greedy(model, ids, attention_mask=mask, use_cache=False)
    with attach(model, SPARSE) as attached:
        assert greedy(model, ids, attention_mask=mask, **without_cache(where, model)) == expected
        assert attached.cache is None


@pytest.mark.parametrize("where", ["model's generation config", "model's config", "copy of the model's"])
def test_a_configuration_without_a_cache_is_overridden(where: str, recwarn: pytest.WarningsRecorder) -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    expected = greedy(model, ids)
    arguments, own = without_cache(where, model), QuestCache(model.config, EVERYTHING)
    with attach(model, EVERYTHING) as attached:
        assert greedy(model, ids, **arguments) == expected
        assert attached.cache.report().tokens == (47,)
        assert greedy(model, ids, cache=own, **arguments) == expected
    assert own.report().tokens == (47,)
    said = [str(warning.message) for warning in recwarn if "use_cache: false" in str(warning.message)]
    assert len(said) == (where != "model's config")


@pytest.mark.filterwarnings("ignore:this model's generation config says use_cache:UserWarning")
def test_a_folder_that_says_so_is_overridden(tmp_path: Path) -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    expected = greedy(model, ids)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_cache": False}))
    (tmp_path / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    with attach(model, EVERYTHING) as attached:
        assert greedy(model, ids) == expected
        assert attached.cache.report().tokens == (47,)


def test_a_call_with_a_cache_that_says_there_is_none_is_refused() -> None:
    model = build("llama", "sdpa")
    with attach(model), pytest.raises(CacheMismatchError, match=r"\[attach\] use_cache: expected True.*got False"):
        greedy(model, tokens(1, 9), cache=QuestCache(model.config), use_cache=False)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_a_forward_without_a_cache_returns_none_and_has_gradients(as_tuple: bool) -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()

    def gradient() -> torch.Tensor:
        out = model(inputs_embeds=embeddings, use_cache=False, return_dict=not as_tuple)
        if as_tuple:
            assert len(out) == 1
        else:
            assert out.cache is None
        out[0][0, -1, 5].backward()
        found, embeddings.grad = embeddings.grad, None
        return found

    expected = gradient()
    with attach(model, SPARSE) as attached:
        assert torch.equal(gradient(), expected)
        assert attached.cache is None


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_attached_draft_of_a_hybrid_is_cropped(name: str, seed: int) -> None:
    attention = "eager" if name == "gemma2" else "sdpa"
    model, draft, ids = build(name, attention), build(name, attention, seed=seed), tokens(1, 17)
    expected = greedy(model, ids, max_new_tokens=16)
    with attach(model, EVERYTHING) as attached, attach(draft, EVERYTHING) as drafting:
        assert greedy(model, ids, max_new_tokens=16, assistant_model=draft) == expected
        assert drafting.cache.report().tokens[0] >= 17
        assert attached.cache.report().tokens[0] >= 32


def compile_forward(model: Any) -> str:
    model.forward = torch.compile(model.forward, backend="eager")
    return "a model"


def compile_in_place(model: Any) -> str:
    model.compile(backend="eager")
    return "a model"


def compile_the_decoder(model: Any) -> str:
    model.model = torch.compile(model.model, backend="eager")
    return "model"


def compile_a_layer(model: Any) -> str:
    model.model.layers[1].compile(backend="eager")
    return "model.layers.1"


@pytest.mark.parametrize("compile_it", [compile_forward, compile_in_place, compile_the_decoder, compile_a_layer])
def test_a_compiled_forward_is_refused(compile_it: Any) -> None:
    model = build("llama", "sdpa")
    where = compile_it(model)
    before = everything_about(model)
    expected = rf"\[attach\] model: expected attention that torch.compile hasn't taken, got {where} with"
    with pytest.raises(UnsupportedError, match=expected), attach(model):
        pass
    assert everything_about(model) == before


def test_compiled_parts_that_do_not_attend_stay() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    expected = greedy(model, ids)
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    with attach(torch.compile(model, backend="eager"), EVERYTHING) as attached:
        assert greedy(model, ids) == expected
        assert attached.cache.report().tokens == (47,)


@pytest.mark.slow
def test_a_compiled_forward_of_a_cache_s_own_is_named() -> None:
    model = build("llama", "questkv", num_hidden_layers=1)
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(TorchDynamoException, match=r"\[questkv\] torch.compile: expected a model whose forward isn't"):
        model(tokens(1, 9), cache=QuestCache(model.config))


def test_every_call_without_a_cache_gets_a_fresh_one() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
    with attach(model, EVERYTHING) as attached, torch.no_grad():
        first = model(ids)
        assert isinstance(first.cache, QuestCache)
        assert first.cache is attached.cache
        second = model(ids)
        assert attached.cache is not first.cache
        assert attached.cache.report().tokens == (40,)
    for out in (first, second):
        assert (out.logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_call_keeps_the_cache_it_brings() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    own = QuestCache(model.config, EVERYTHING)
    with attach(model, SPARSE) as attached:
        greedy(model, ids, cache=own)
        with torch.no_grad():
            assert model(tokens(1, 1), cache=own).cache is own
        assert attached.cache is None
    assert own.report().tokens == (48,)
    assert own.report().share_read == 1.0


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_cache_under_its_older_name_is_kept_too() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    own = QuestCache(model.config, EVERYTHING)
    with attach(model, SPARSE) as attached:
        greedy(model, ids, past_key_values=own)
        assert attached.cache is None
    assert own.report().tokens == (47,)


def test_a_call_that_brings_another_kind_of_cache_is_refused() -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 40)
    with attach(model), pytest.raises(CacheMismatchError, match="expected a QuestCache"):
        greedy(model, ids, cache=DynamicCache(config=model.config))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 9},
        {"prefill_chunk_size": 7},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_every_way_to_generate_works_inside(kwargs: dict[str, Any]) -> None:
    model, ids = build("llama", "sdpa"), tokens(1, 8).repeat(1, 4)
    torch.manual_seed(5)
    expected = greedy(model, ids, **kwargs)
    with attach(model, EVERYTHING):
        torch.manual_seed(5)
        assert greedy(model, ids, **kwargs) == expected


def test_a_text_generation_pipeline_works_inside() -> None:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w1"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", padding_side="left")
    model = build("llama", "sdpa")
    prompts = [" ".join(f"w{i}" for i in tokens(n, seed=n).tolist()) for n in (40, 17)]
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 6, "do_sample": False, "batch_size": 2}
    expected = pipe(prompts, **settings)
    with attach(model, EVERYTHING) as attached:
        assert pipe(prompts, **settings) == expected
        assert attached.cache.report().tokens == (45, 22)
    with attach(model, SPARSE) as attached:
        pipe(prompts, **settings)
        assert attached.cache.report().share_read < 0.9
    assert pipe(prompts, **settings) == expected


def test_an_own_generate_of_the_instance_comes_back() -> None:
    model, calls = build("llama", "sdpa"), []
    original = model.generate

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(*args, **kwargs)

    model.generate = mine
    with attach(model, SPARSE) as attached:
        greedy(model, tokens(1, 20))
        assert isinstance(calls[-1]["cache"], QuestCache)
        assert attached.cache is calls[-1]["cache"]
    assert model.generate is mine


def test_a_vision_tower_keeps_its_own_attention() -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = small | {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "layer_types": ["full_attention"] * 2}
    config = Gemma3Config(text_config=text, vision_config=small | {"image_size": 28, "patch_size": 14})
    config._attn_implementation = "sdpa"
    model = Gemma3ForConditionalGeneration(config).eval()
    before = everything_about(model)
    ids = torch.randint(1, 30, (1, 20))
    with torch.no_grad():
        expected = model(ids).logits
    with attach(model, EVERYTHING) as attached:
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert model.config.get_text_config()._attn_implementation == "questkv"
        with torch.no_grad():
            got = model(ids).logits
        assert attached.cache.report().tokens == (20,)
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    assert everything_about(model) == before
