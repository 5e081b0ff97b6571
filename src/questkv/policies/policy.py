"""`Policy`: a way to decode behind a prefilled context, as the other methods and Quest are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers.cache_utils import Cache

from questkv.config import QuestConfig
from questkv.errors import ConfigError
from questkv.policies.context import Context


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """One method with its budget and settings; frozen, so it may be used for any number of contexts.

    The budget counts the same for every method: the tokens that a KV head holds or reads while a token is decoded, that
    token, the first (sink) and the recent ones included. Dense layers hold and read everything under every method.

    Attributes:
        name: The method's name in `METHODS`.
        uses_budget: Whether the method has a budget at all.
        observes: Whether it needs the prompt's attention statistics (`prefill_context(observe=True)`).
        budget: Tokens, at least `smallest_budget`; None for a method without a budget.

    Raises:
        ConfigError: A field holds an impossible value.
    """

    name: ClassVar[str]
    uses_budget: ClassVar[bool] = True
    observes: ClassVar[bool] = False

    budget: int | None = None

    def __post_init__(self) -> None:
        if not self.uses_budget:
            if self.budget is not None:
                raise ConfigError(f"[{self.name}] budget: expected None, since the method has none, got {self.budget}")
            return
        budget, least = self.budget, self.smallest_budget
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < least:
            raise ConfigError(f"[{self.name}] budget: expected at least {least} tokens (an int), got {budget!r}")

    @property
    def smallest_budget(self) -> int:
        """Tokens below which the method has no meaning."""
        return 1

    @abstractmethod
    def decode_cache(self, context: Context) -> Cache:
        """A fresh cache that continues `context`, for a model whose attention is ``questkv``; batch 1.

        The context stays as it was, so that every method and budget can start from the same one.

        Raises:
            ConfigError: The context lacks what the method needs.
        """

    def fields(self) -> dict[str, Any]:
        """The settings as plain JSON values, the budget among them: what belongs beside a result."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, QuestConfig):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value
