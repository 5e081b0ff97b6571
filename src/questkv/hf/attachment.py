"""`attach`: use questkv in code that can't be given a cache (pipelines, other people's loops)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from questkv.config import QuestConfig
from questkv.errors import UnsupportedError
from questkv.hf.attention import NAME
from questkv.hf.cache import QuestCache
from questkv.hf.compiled import arguments_of, compiled_step
from questkv.hf.linear_layers import fast_linear_layers
from questkv.hf.prefill import cache_argument
from questkv.hf.support import check_cache_implementation, check_model
from questkv.hf.watch import watching

_COMPILES = "_questkv_compiles"


class Attachment:
    """What `attach` yields.

    Attributes:
        config: The method's configuration.
        cache: The cache of the latest call, for its `report()`; None before the first.
    """

    def __init__(self, model: PreTrainedModel, config: QuestConfig) -> None:
        self.config = config
        self.cache: QuestCache | None = None
        self._model_config = model.config

    def new_cache(self) -> QuestCache:
        """A fresh cache for one call."""
        self.cache = QuestCache(self._model_config, self.config)
        return self.cache


@contextmanager
def attach(
    model: PreTrainedModel,
    config: QuestConfig | None = None,
    *,
    fast_linear: bool = False,
    compile: bool = False,
) -> Iterator[Attachment]:
    """Make a model decode with questkv inside the block, and leave it as it was after.

    Inside, the model's attention implementation is ``questkv``, and `generate` and `forward` calls that bring no cache
    get a fresh `QuestCache`. A call that brings its own must bring a `QuestCache`.

    Args:
        model: A causal language model.
        config: The method's configuration; the default one if None.
        fast_linear: Run the linear layers of a decode step at the memory's speed (CPU); see `fast_linear_layers`.
        compile: Run every decode step (a call with one token a sequence and a `QuestCache`) as one graph of
            torch.compile. The first step compiles it; longer runs of tokens are not compiled. See docs/decode.md.

    Yields:
        The `Attachment`, whose `cache.report()` tells what the latest call read.

    Raises:
        TypeError: `config` is something else; the model is as it was.
        UnsupportedError: A model of this class can't decode from pages; the message says why, the model is as it
            was.
        UnsupportedError: With `compile`, from a decode step of a model that torch.compile can't take as one graph, or
            at once where the model's forward was replaced. Nothing falls back to the uncompiled step.

    Example:
        >>> with attach(model, QuestConfig(token_budget=0.2)) as attached:
        ...     text = pipeline("text-generation", model=model, tokenizer=tokenizer)(prompt)
        ...     print(attached.cache.report())
    """
    if config is not None and not isinstance(config, QuestConfig):
        raise TypeError(f"[attach] config: expected a QuestConfig, got {type(config).__name__}")
    check_model(model)
    attachment = Attachment(model, config if config is not None else QuestConfig())
    names = ("cache", "past_key_values")
    cache_name = cache_argument(model)
    generate = model.generate

    def generate_with_cache(*args: Any, **kwargs: Any) -> Any:
        check_cache_implementation(model, kwargs)
        if not any(kwargs.get(name) is not None for name in names) and kwargs.get("use_cache", True):
            kwargs[cache_name] = attachment.new_cache()
        return generate(*args, **kwargs)

    def give_cache(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if arguments_of(model, args, kwargs).get(cache_name) is None:
            kwargs = {**kwargs, cache_name: attachment.new_cache()}
        return args, kwargs

    own_generate = model.__dict__.get("generate")
    with ExitStack() as stack:
        stack.enter_context(_attention_set_to(model, NAME))
        if fast_linear:
            stack.enter_context(fast_linear_layers(model))
        if compile:
            stack.enter_context(_steps_compiled(model))
        stack.enter_context(watching(model))
        # First of all hooks, so that an attachment inside another one comes before it.
        hook = model.register_forward_pre_hook(give_cache, with_kwargs=True, prepend=True)
        model.generate = generate_with_cache
        try:
            yield attachment
        finally:
            hook.remove()
            del model.generate
            if own_generate is not None:
                model.generate = own_generate


@contextmanager
def _steps_compiled(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's forward hands decode steps to its `CompiledStep`."""
    before = model.__dict__.get("forward")
    if before is not None and not getattr(before, _COMPILES, False):
        raise UnsupportedError(
            f"[attach] compile: expected a model with the forward of its class, got one whose forward was replaced by "
            f"{getattr(before, '__qualname__', type(before).__name__)}"
        )
    step, forward = compiled_step(model), model.forward

    @functools.wraps(forward)
    def forward_compiled(*args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(model, args, kwargs)
        return step(model, arguments) if step.takes(model, arguments) else forward(*args, **kwargs)

    setattr(forward_compiled, _COMPILES, True)
    model.forward = forward_compiled
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before


@contextmanager
def _attention_set_to(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set the attention implementation of the text model, and put every submodel's own back afterwards."""
    before = {
        id(module.config): (module.config, module.config._attn_implementation_internal)
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    }
    text = model.config.get_text_config(decoder=True)
    before.setdefault(id(text), (text, text._attn_implementation_internal))
    # A vision or audio tower beside the text model keeps its own attention.
    towers = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({towers[0]: name} if towers else name)
    try:
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation
