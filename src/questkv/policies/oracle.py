"""Oracles: what a selection could be if the true attention were known before anything was read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from transformers.cache_utils import Cache

from questkv.config import QuestConfig
from questkv.kernels import Scoring, Softmax, select
from questkv.policies.budget import fit
from questkv.policies.cache import PolicyCache, dense_layer
from questkv.policies.context import Context
from questkv.policies.layer import HeldLayer
from questkv.policies.policy import Policy
from questkv.policies.softmax import attention_weights


@dataclass(frozen=True, kw_only=True)
class OraclePolicy(Policy):
    """Computes the whole attention, chooses tokens by it, and attends to the chosen ones alone.

    There is one choice per KV head, by the mean over its query heads of their attention mass. An oracle saves nothing;
    it shows what a perfect estimate would reach.
    """

    @abstractmethod
    def choose(self, mass: torch.Tensor) -> torch.Tensor:
        """Tokens to read, [Hkv, k] int64 positions, by the mass [Hkv, T] of the latest query, the last of T tokens."""

    @abstractmethod
    def is_dense_layer(self, layer: int) -> bool:
        """Whether the model's layer reads everything."""

    def decode_cache(self, context: Context) -> Cache:
        """See `Policy.decode_cache`."""

        def make_layer(index: int) -> HeldLayer:
            layer = dense_layer(context, index)
            return layer if self.is_dense_layer(index) else OracleLayer(layer, self.choose)

        return PolicyCache(context, make_layer)


@dataclass(frozen=True, kw_only=True)
class Oracle(OraclePolicy):
    """Pages by true attention mass, under Quest's rules: the same budget, sink, recent and open page.

    What Quest would read if its estimate were perfect. `optimism` and `group` play no part.

    Attributes:
        config: As for `Quest`.
    """

    name: ClassVar[str] = "oracle"

    config: QuestConfig = field(default_factory=QuestConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.budget is not None
        object.__setattr__(self, "config", fit(self.config, self.budget))

    def is_dense_layer(self, layer: int) -> bool:
        """See `OraclePolicy.is_dense_layer`."""
        return self.config.is_dense_layer(layer)

    def choose(self, mass: torch.Tensor) -> torch.Tensor:
        """The tokens of the pages of highest mass, the forced ones among them, and of the open page."""
        (kv_heads, length), size = mass.shape, self.config.page_size
        every = torch.arange(length, device=mass.device).expand(kv_heads, -1)
        if self.config.is_dense_at(length):
            return every
        sealed = (length - 1) // size
        scores = mass[:, : sealed * size].unflatten(1, (sealed, size)).sum(dim=-1)
        pages = select(
            scores[None],
            torch.tensor([sealed], device=mass.device),
            torch.tensor([self.config.pages_at(length)], device=mass.device),
            Scoring.of(self.config),
            backend=self.config.backend,
        )[0]
        tokens = (pages[..., None] * size + every[0, :size]).flatten(1)
        return torch.cat([tokens, every[:, sealed * size :]], dim=1)


@dataclass(frozen=True, kw_only=True)
class OracleTokens(OraclePolicy):
    """Single tokens by true attention mass, none forced: the most mass that a budget can hold.

    Attributes:
        dense_layers: How many first layers read everything, or a tuple of layer numbers; as in `QuestConfig`.
    """

    name: ClassVar[str] = "oracle_tokens"

    dense_layers: int | tuple[int, ...] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_layers", QuestConfig(dense_layers=self.dense_layers).dense_layers)

    def is_dense_layer(self, layer: int) -> bool:
        """See `OraclePolicy.is_dense_layer`."""
        return QuestConfig(dense_layers=self.dense_layers).is_dense_layer(layer)

    def choose(self, mass: torch.Tensor) -> torch.Tensor:
        """The `budget` tokens of highest mass; of equals, the earlier one."""
        order = mass.argsort(dim=-1, descending=True, stable=True)
        return order[:, : self.budget].sort(dim=-1).values


class OracleLayer(HeldLayer):
    """Holds every token and reads those that an oracle chooses.

    Args:
        layer: A layer that holds every token of the prompt, taken over.
        choose: See `OraclePolicy.choose`.
    """

    def __init__(self, layer: HeldLayer, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(layer.tokens, layer.seen)
        self._choose = choose

    def _read(self, logits: torch.Tensor, values: torch.Tensor, softmax: Softmax) -> tuple[torch.Tensor, torch.Tensor]:
        # Nothing is dropped, so slots are positions.
        chosen = self._choose(attention_weights(logits, softmax).mean(dim=1))
        at = chosen[:, None].expand(-1, logits.shape[1], -1)
        return super()._read(
            logits.gather(2, at), values.gather(1, chosen[..., None].expand(-1, -1, values.shape[-1])), softmax
        )
