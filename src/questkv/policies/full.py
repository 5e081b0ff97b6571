"""The full cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from transformers.cache_utils import Cache

from questkv.policies.context import Context
from questkv.policies.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Reads every token, with the dense kernels: what every other method is measured against."""

    name: ClassVar[str] = "full"
    uses_budget: ClassVar[bool] = False

    def decode_cache(self, context: Context) -> Cache:
        """See `Policy.decode_cache`."""
        return context.cache.fork(replace(context.cache.config, token_budget=1.0))
