"""`attach`: use questkv in code that can't be given a cache (pipelines, other people's loops)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from questkv.config import QuestConfig
from questkv.hf.attached import Entry, entered
from questkv.hf.cache import QuestCache
from questkv.hf.support import check_model


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
    get a fresh `QuestCache`. A call that brings its own must bring a `QuestCache`. A call that says ``use_cache=False``
    runs without a cache and attends to everything, as with transformers' own attention; where only the model's
    configuration says so, there is a cache all the same, and a warning.

    Attachments of one model may overlap and end in any order; the last one to end leaves the model as it was before the
    first. A call belongs to the attachment that its thread entered last; a thread that entered none uses the latest.
    Inside, the model can't be copied with `copy.deepcopy` or pickled.

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
            at once where the model's forward was replaced. Nothing falls back to the uncompiled step. Always where
            torch.compile has taken the forward of the model or of a part of it that attends.

    Example:
        >>> with attach(model, QuestConfig(token_budget=0.2)) as attached:
        ...     text = pipeline("text-generation", model=model, tokenizer=tokenizer)(prompt)
        ...     print(attached.cache.report())
    """
    if config is not None and not isinstance(config, QuestConfig):
        raise TypeError(f"[attach] config: expected a QuestConfig, got {type(config).__name__}")
    # torch.compile(model) is a shell around the model, which its `generate` belongs to.
    model = getattr(model, "_orig_mod", model)
    check_model(model)
    attachment = Attachment(model, config if config is not None else QuestConfig())
    if model.generation_config is not None and model.generation_config.use_cache is False:
        warnings.warn(
            "this model's generation config says use_cache: false; questkv generates with a cache all the same, but "
            "for calls that say use_cache=False themselves",
            UserWarning,
            stacklevel=1,  # the commands print what comes from this package
        )
    with entered(model, Entry(attachment, fast_linear, compile)):
        yield attachment
