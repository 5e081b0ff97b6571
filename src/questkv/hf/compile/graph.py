"""The decode step as one compiled graph: the model's forward for one new token a sequence, under torch.compile."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate

from questkv.errors import UnsupportedError
from questkv.hf.attention import NAME
from questkv.hf.cache import QuestCache
from questkv.hf.compile.operator import HANDLE
from questkv.hf.compile.structure import Structure
from questkv.hf.layer import PagedLayer
from questkv.hf.prefill import cache_argument

# The arguments that may hold the new tokens.
_NEW_TOKENS = ("input_ids", "inputs_embeds")
# Structures of a model whose graphs are kept: as it is with its linear layers fast and not, and a few more.
_MOST_KEPT = 8
_steps: WeakKeyDictionary[PreTrainedModel, CompiledStep] = WeakKeyDictionary()


def compiled_step(model: PreTrainedModel) -> CompiledStep:
    """The model's compiled step, made once: later calls find the graphs that earlier ones compiled."""
    if model not in _steps:
        _steps[model] = CompiledStep(model)
    return _steps[model]


class CompiledStep:
    """A model's forward for one new token of every sequence behind a `QuestCache`.

    Before the graph runs, the cache makes room for the token, once for all layers. In the graph every layer's attention
    is one call of ``torch.ops.questkv.step``. Nothing in it depends on how long the cache is, so nothing is compiled
    again as it grows. A new batch size is compiled when it comes.

    Args:
        model: A causal language model; it isn't kept alive.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._cache_argument = cache_argument(model)
        self._stub = _StepCache(model.config)
        self._graphs: list[tuple[Structure, Callable[..., Any]]] = []

    def takes(self, model: PreTrainedModel, arguments: dict[str, Any]) -> bool:
        """Whether a call of the model's forward is a decode step: one token a sequence, and a `QuestCache` to read."""
        new = _new_tokens(arguments)
        return (
            isinstance(new, torch.Tensor)
            and new.shape[1] == 1
            and isinstance(arguments.get(self._cache_argument), QuestCache)
            and model.config.get_text_config(decoder=True)._attn_implementation == NAME
        )

    def __call__(self, model: PreTrainedModel, arguments: dict[str, Any]) -> Any:
        """Run the step.

        Args:
            model: The model.
            arguments: Those of its forward, by name.

        Returns:
            What the model's forward returns.

        Raises:
            UnsupportedError: The model, its cache or an argument can't be compiled; the message says why.
        """
        rest = dict(arguments)
        cache, new = rest.pop(self._cache_argument), _new_tokens(rest)
        mask, positions = rest.pop("attention_mask", None), rest.pop("position_ids", None)
        as_tuple = rest.pop("return_dict", None) is False
        self._refuse(cache, mask)
        batch = new.shape[0]
        # One kind of tensor and one gradient mode, whatever the caller's: a graph is compiled for each.
        with torch.inference_mode(False), torch.no_grad():
            if positions is None:
                positions = torch.full((batch, 1), cache.state.columns, device=new.device)
            elif positions.ndim == 2:
                positions = positions.expand(batch, -1)
            # A copy has the strides of its shape, a slice of a longer tensor hasn't.
            new, positions = (x.clone(memory_format=torch.contiguous_format) for x in (new, positions))
            rest |= {name: new for name in _NEW_TOKENS if rest.get(name) is not None}
            local_masks = self._local_masks(model, cache, batch, mask, positions)
            cache.begin_step(batch, None if mask is None else mask[:, -cache.state.columns - 1 :].bool(), local_masks)
            rest |= {self._cache_argument: self._stub, HANDLE: cache.handle, "return_dict": True}
            rest |= {"position_ids": positions}
            try:
                out = self._graph(model)(model, rest)
            except TorchDynamoException as error:
                raise UnsupportedError(
                    f"[compile] {type(model).__name__}: expected a model whose decode step torch.compile takes as one "
                    f"graph, got {type(error).__name__}: {_first_line(error)}; run it without compile"
                ) from error
        out[self._cache_argument] = cache
        return out.to_tuple() if as_tuple else out

    def _graph(self, model: PreTrainedModel) -> Callable[..., Any]:
        """The graph of the model as it is now: one that was made before, or a new one, compiled when it is called."""
        for structure, graph in self._graphs:
            if structure.is_of(model):
                return graph
        # torch counts compilations by code object, so every structure gets one of its own.
        run = FunctionType(_run.__code__.replace(), globals(), "questkv_step")
        options: dict[str, str | int | bool | Callable[..., Any]] = {
            "guard_filter_fn": _not_modules,
            # The shapes of what operators give are asserted some 900 times a step; those of ours are tested.
            "size_asserts": False,
            # One token's sums end sooner in one thread; and torch's, once awake, spin on the cores that ours need.
            "cpp.min_chunk_size": 16384,
        }
        graph = torch.compile(run, fullgraph=True, options=options)
        self._graphs = [(Structure(model), graph), *self._graphs[: _MOST_KEPT - 1]]
        return graph

    def _refuse(self, cache: QuestCache, mask: Any) -> None:
        kinds = {type(layer) for layer in cache.layers} - {PagedLayer, DynamicSlidingWindowLayer}
        if kinds:
            raise UnsupportedError(
                f"[compile] model: expected full-attention and sliding-window layers, got {kinds.pop().__name__}; run "
                "it without compile"
            )
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            got = f"{mask.ndim} dimensions" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise UnsupportedError(f"[compile] attention_mask: expected a 2-D padding mask or None, got {got}")

    def _local_masks(
        self, model: Any, cache: QuestCache, batch: int, mask: torch.Tensor | None, positions: torch.Tensor
    ) -> dict[int, torch.Tensor | None]:
        """What the model would give its sliding-window layers as a mask, by layer."""
        local = [i for i, layer in enumerate(cache.layers) if not isinstance(layer, PagedLayer)]
        if not local:
            return {}
        make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
        masks = make(
            config=model.config,
            # Only its shape, dtype and device are looked at.
            inputs_embeds=torch.empty((batch, 1, 0), dtype=model.dtype, device=positions.device),
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_argument: cache},
        )
        kinds = model.config.get_text_config(decoder=True).layer_types
        return {layer: masks[kinds[layer]] for layer in local}


def _not_modules(guards: Sequence[Any]) -> Sequence[bool]:
    """Which guards to keep: all but those on the model, which `Structure` looks at."""
    kept: Sequence[bool] = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    return kept


def _run(model: Any, arguments: dict[str, Any]) -> Any:
    """The forward of the model's class: one that was put on the model itself may be what calls this."""
    return type(model).forward(model, **arguments)


def _new_tokens(arguments: dict[str, Any]) -> Any:
    """The new tokens of a forward, [B, n] or [B, n, hidden size]; None if there are none."""
    return next((arguments[name] for name in _NEW_TOKENS if arguments.get(name) is not None), None)


class _StepCache(Cache):
    """Stands for the cache inside the graph: hands keys and values on to the attention function and holds nothing."""

    def __init__(self, model_config: Any) -> None:
        super().__init__(layers=[_StepLayer() for _ in DynamicCache(config=model_config).layers])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0: what it is used for, the mask, is made outside the graph."""
        return 0


class _StepLayer(CacheLayerMixin):
    is_sliding = False
    is_compileable = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values themselves."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Those of the new token alone."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Refused: as a number it would be part of the graph."""
        raise UnsupportedError(
            "[compile] model: expected its forward to work from position_ids, it asks for the cache's length"
        )

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1


def refuse_compiled_forward(model: torch.nn.Module) -> None:
    """Raise where torch.compile would trace into the cache, which it can't.

    Raises:
        UnsupportedError: The forward of the model, or of a part of it that attends, was compiled.
    """
    for name, module in model.named_modules():
        is_compiled = (
            module._compiled_call_impl is not None
            or isinstance(module, torch._dynamo.OptimizedModule)
            or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        )
        if is_compiled and any(hasattr(part, "layer_idx") and hasattr(part, "is_causal") for part in module.modules()):
            raise UnsupportedError(
                f"[attach] model: expected attention that torch.compile hasn't taken, got {name or 'a model'} with a "
                "compiled forward; leave that out, and let attach(model, compile=True) compile the decode steps"
            )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def arguments_of(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of the model's forward, the cache by its newer name where there are two."""
    if args:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if "past_key_values" in kwargs and (name := cache_argument(model)) != "past_key_values":
        kwargs = {name: kwargs["past_key_values"], **kwargs}
        del kwargs["past_key_values"]
    return kwargs
