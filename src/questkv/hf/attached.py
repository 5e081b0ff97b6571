"""What `attach` puts on a model, for as long as an attachment to it lasts."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from questkv.errors import CacheMismatchError, UnsupportedError
from questkv.hf.attention import NAME
from questkv.hf.cache import QuestCache
from questkv.hf.compile.graph import arguments_of, compiled_step, refuse_compiled_forward
from questkv.hf.linear_layers import fast_linear_layers
from questkv.hf.prefill import cache_argument
from questkv.hf.support import check_cache_implementation
from questkv.hf.uncached import NoCache, without_cache
from questkv.hf.watch import watching

_ATTRIBUTE = "_questkv_attached"
_CACHES = ("cache", "past_key_values")
# Attachments begin and end one at a time.
_lock = threading.RLock()
# The model and cache of the innermost `generate` that runs in this thread.
_generating: ContextVar[tuple[Any, Any] | None] = ContextVar("questkv_generating", default=None)


class GivesCaches(Protocol):
    """What makes the caches for calls that bring none."""

    def new_cache(self) -> QuestCache:
        """A fresh cache for one call."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One attachment of a model.

    Attributes:
        attachment: Where its calls get their caches.
        fast_linear: As in `attach`.
        compile: As in `attach`.
        thread: The thread that entered it.
    """

    attachment: GivesCaches
    fast_linear: bool = False
    compile: bool = False
    thread: int = field(default_factory=threading.get_ident)


@contextmanager
def entered(model: PreTrainedModel, entry: Entry) -> Iterator[None]:
    """Inside, the model is attached; entries of one model may be left in any order.

    The first one changes the model, and the last one to be left makes it what it was. In between, a call belongs to the
    entry that its own thread entered last; if it has none, to the one that was entered last of all.
    """
    with _lock:
        attached = model.__dict__.get(_ATTRIBUTE) or AttachedModel(model)
        attached.add(entry)
    try:
        yield
    finally:
        with _lock:
            attached.remove(entry)


class AttachedModel:
    """A model's attachments, and how the model was before the first of them.

    It lies on the model itself, which is what refuses to copy or pickle the model.

    Args:
        model: The model; nothing is changed before the first `add`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache_name = cache_argument(model)
        self._own_generate = model.__dict__.get("generate")
        self._generate = model.generate
        self._entries: tuple[Entry, ...] = ()
        self._base = ExitStack()
        self._options = {"fast_linear": ExitStack(), "compile": ExitStack()}

    def add(self, entry: Entry) -> None:
        """Make `entry` the latest one; if that fails, all is as it was."""
        try:
            if not self._entries:
                self._change_model()
            for name, change in (("fast_linear", fast_linear_layers), ("compile", steps_compiled)):
                if getattr(entry, name) and not any(getattr(other, name) for other in self._entries):
                    self._options[name].enter_context(change(self._model))
        except BaseException:
            self._close_unused()
            raise
        self._entries = (*self._entries, entry)

    def remove(self, entry: Entry) -> None:
        """Undo what only `entry` asked for."""
        self._entries = tuple(other for other in self._entries if other is not entry)
        self._close_unused()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`, with a fresh cache where the call brings none."""
        entry = self._current()
        if entry is None:  # kept by somebody beyond the last attachment
            return self._generate(*args, **kwargs)
        check_cache_implementation(self._model, kwargs)
        brought = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
        asked = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        own = self._model.generation_config
        said = kwargs.get("use_cache", None if asked is None else asked.use_cache)
        # A pipeline hands on a copy of the model's own generation config: what it says there the call doesn't say.
        if said is False and ("use_cache" in kwargs or own.use_cache is not False):
            if brought is not None:
                raise CacheMismatchError(
                    "[attach] use_cache: expected True in a call that brings a cache, got False; leave one of them out"
                )
            return self._generate(*args, **kwargs)
        if brought is None:
            brought = kwargs[self._cache_name] = entry.attachment.new_cache()
            if getattr(asked, "is_assistant", False):
                brought.activate_past_recording()  # as transformers does for the caches that it makes for a draft
        if own.use_cache is False and said is not True:
            args, kwargs = _with_use_cache(args, kwargs)
        running = _generating.set((self._model, brought))
        try:
            return self._generate(*args, **kwargs)
        finally:
            _generating.reset(running)

    def give_cache(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before a forward: a cache for one that brings none."""
        entry = self._current()
        arguments = arguments_of(self._model, args, kwargs)
        if entry is None or arguments.get(self._cache_name) is not None:
            return args, kwargs
        cache: Any
        if arguments.get("use_cache") is False:
            cache = NoCache(self._model.config)
        else:
            cache = self._dropped(arguments.get("input_ids")) or entry.attachment.new_cache()
        return args, {**kwargs, self._cache_name: cache}

    def take_cache(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Hook after a forward: what stood in for a cache goes."""
        cache = kwargs.get(self._cache_name)
        return without_cache(out, cache) if isinstance(cache, NoCache) else out

    def _dropped(self, ids: Any) -> QuestCache | None:
        """The cache of the running `generate`, emptied, where transformers left it out to read all tokens anew.

        Phi-3 does so where a sequence is longer than its original context, since its rotary embedding takes other
        frequencies there.
        """
        model, cache = _generating.get() or (None, None)
        if model is not self._model or not isinstance(cache, QuestCache) or not isinstance(ids, torch.Tensor):
            return None
        if cache.get_seq_length() >= ids.shape[1]:
            return None
        # What was read so far stays counted.
        counted = cache.state.counts.counted
        cache.reset()
        cache.state.counts.counted = counted
        return cache

    def _current(self) -> Entry | None:
        entries, thread = self._entries, threading.get_ident()
        own = [entry for entry in entries if entry.thread == thread]
        return (own or entries or (None,))[-1]

    def _change_model(self) -> None:
        model = self._model
        refuse_compiled_forward(model)
        self._base.enter_context(_attention_set_to(model, NAME))
        # First of all hooks, so that others see the call as it is run.
        self._base.callback(model.register_forward_pre_hook(self.give_cache, with_kwargs=True, prepend=True).remove)
        self._base.callback(model.register_forward_hook(self.take_cache, with_kwargs=True).remove)
        self._base.enter_context(watching(model))
        setattr(model, _ATTRIBUTE, self)
        self._base.callback(delattr, model, _ATTRIBUTE)
        model.generate = self.generate
        self._base.callback(self._put_generate_back)

    def _put_generate_back(self) -> None:
        self._model.__dict__.pop("generate", None)
        if self._own_generate is not None:
            self._model.generate = self._own_generate

    def _close_unused(self) -> None:
        for name, stack in self._options.items():
            if not any(getattr(entry, name) for entry in self._entries):
                stack.close()
        if not self._entries:
            self._base.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a copy of the model would run the original.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"[attach] copy: expected a {type(self._model).__name__} that isn't attached, got one inside a block of "
            "attach; copy or save the whole object before the block or after it"
        )


@contextmanager
def steps_compiled(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's forward hands decode steps to its `CompiledStep`."""
    replaced = model.__dict__.get("forward")
    if replaced is not None:
        raise UnsupportedError(
            f"[attach] compile: expected a model with the forward of its class, got one whose forward was replaced by "
            f"{getattr(replaced, '__qualname__', type(replaced).__name__)}"
        )
    step, forward = compiled_step(model), model.forward

    @functools.wraps(forward)
    def forward_compiled(*args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(model, args, kwargs)
        return step(model, arguments) if step.takes(model, arguments) else forward(*args, **kwargs)

    model.forward = forward_compiled
    try:
        yield
    finally:
        del model.forward


def _with_use_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with ``use_cache=True``, in its generation config where it has one."""
    if kwargs.get("generation_config") is not None:
        config = copy.deepcopy(kwargs["generation_config"])
        config.use_cache = True
        return args, {**kwargs, "generation_config": config}
    return args, {**kwargs, "use_cache": True}


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
    try:
        model.set_attn_implementation({towers[0]: name} if towers else name)
        yield
    finally:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation
