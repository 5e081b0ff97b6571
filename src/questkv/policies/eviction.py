"""What the eviction methods share: a score for every held token, and the tokens of lowest priority dropped for good."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from questkv.config import QuestConfig
from questkv.errors import ConfigError
from questkv.kernels import Softmax
from questkv.policies.cache import PolicyCache, dense_layer
from questkv.policies.context import Context
from questkv.policies.layer import HeldLayer
from questkv.policies.policy import Policy
from questkv.policies.softmax import attention_logits
from questkv.policies.statistics import Statistics
from questkv.policies.tokens import HeldTokens


@dataclass(frozen=True)
class Moment:
    """Where in a sequence tokens are about to be dropped.

    Attributes:
        seen: Tokens so far, and so the position of the token that is about to come.
        prompt: Tokens of the prompt among them.
    """

    seen: int
    prompt: int


@dataclass(frozen=True, kw_only=True)
class EvictionPolicy(Policy):
    """A method that holds at most `budget` tokens per KV head and layer and forgets the others.

    At the prompt's end, and before each new token, tokens of the lowest priority are dropped until `budget` - 1 are
    left and the new one fits; among equals the older goes. A token that was dropped is gone. Keys keep the positions
    that they were rotated for.

    Attributes:
        budget: Tokens held while a token is decoded, that token included.
        dense_layers: How many first layers hold everything, or a tuple of layer numbers; as in `QuestConfig`.
    """

    dense_layers: int | tuple[int, ...] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_layers", QuestConfig(dense_layers=self.dense_layers).dense_layers)

    @property
    def budget_tokens(self) -> int:
        """`budget` as the int that it has been checked to be."""
        assert self.budget is not None
        return self.budget

    @abstractmethod
    def first_scores(self, statistics: Statistics | None, shape: tuple[int, int]) -> torch.Tensor:
        """Scores of the prompt's tokens, [Hkv, n] float32; `statistics` is None unless the method observes."""

    @abstractmethod
    def next_scores(self, scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """Scores after a query, both [Hkv, T]: `mass` is its attention, `scores` those before, 0 for its own token."""

    @abstractmethod
    def priorities(self, scores: torch.Tensor, positions: torch.Tensor, moment: Moment) -> torch.Tensor:
        """[Hkv, T] of the held tokens, float: the lowest are dropped, +inf ones last."""

    def decode_cache(self, context: Context) -> Cache:
        """See `Policy.decode_cache`."""
        if self.observes and not context.statistics:
            raise ConfigError(
                f"[{self.name}] context: expected one that was prefilled with observe=True, got none such"
            )
        layers = QuestConfig(dense_layers=self.dense_layers)

        def make_layer(index: int) -> HeldLayer:
            if layers.is_dense_layer(index):
                return dense_layer(context, index)
            return EvictingLayer(self, context, index)

        return PolicyCache(context, make_layer)


class EvictingLayer(HeldLayer):
    """A layer that holds at most a policy's budget of tokens.

    Args:
        policy: Says what is dropped.
        context: The prompt; left as it is.
        index: The model's layer.
    """

    def __init__(self, policy: EvictionPolicy, context: Context, index: int) -> None:
        keys, values = context.cache.keys_values(index)
        kv_heads, n, _ = keys.shape
        positions = torch.arange(n, device=keys.device).expand(kv_heads, -1)
        scores = policy.first_scores(context.statistics.get(index), (kv_heads, n)).to(keys.device)
        if n >= policy.budget_tokens:
            priorities = policy.priorities(scores, positions, Moment(n, n))
            kept = lowest(priorities, positions, n)[:, n - policy.budget_tokens + 1 :].sort(dim=-1).values
            keys, values = (part.gather(1, kept[..., None].expand(-1, -1, part.shape[2])) for part in (keys, values))
            positions, scores = positions.gather(1, kept), scores.gather(1, kept)
        super().__init__(HeldTokens(keys, values, positions, limit=policy.budget_tokens), n)
        self.policy = policy
        self.prompt = n
        self.scores = scores

    def _step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        own = self.scores.new_zeros(len(key), 1)
        if len(self.tokens) < self.policy.budget_tokens:
            self.tokens.add(key, value, self.seen)
            scores = torch.cat([self.scores, own], dim=1)
        else:
            positions = self.tokens.positions
            priorities = self.policy.priorities(self.scores, positions, Moment(self.seen, self.prompt))
            slots = lowest(priorities, positions, 1)
            self.tokens.put(slots, key, value, self.seen)
            scores = self.scores.scatter(1, slots, own)
        logits = attention_logits(query.unflatten(0, (len(key), -1)), self.tokens.keys, softmax)
        out, weights = self._read(logits, self.tokens.values, softmax)
        self.scores = self.policy.next_scores(scores, weights.mean(dim=1))
        return out.flatten(0, 1)


def lowest(priorities: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """[Hkv, count] slots of the lowest priorities, lowest first; of equals, the older token first."""
    if count == 1:
        equals = priorities == priorities.amin(dim=-1, keepdim=True)
        return positions.masked_fill(~equals, torch.iinfo(positions.dtype).max).argmin(dim=-1, keepdim=True)
    by_age = positions.argsort(dim=-1)
    order = priorities.gather(-1, by_age).argsort(dim=-1, stable=True)[:, :count]
    return by_age.gather(-1, order)
