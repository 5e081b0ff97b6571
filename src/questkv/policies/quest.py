"""Quest, through the package's own cache and kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from transformers.cache_utils import Cache

from questkv.config import QuestConfig
from questkv.policies.budget import fit
from questkv.policies.context import Context
from questkv.policies.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Quest(Policy):
    """Reads the pages that the current query needs most.

    Tang et al., *Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference*, ICML 2024,
    https://arxiv.org/abs/2406.10774.

    Attributes:
        config: The method's configuration; its budget becomes `budget` (see `fit` for small ones). Its page size, box
            and KV dtype must be the context's.
    """

    name: ClassVar[str] = "quest"

    config: QuestConfig = field(default_factory=QuestConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.budget is not None
        object.__setattr__(self, "config", fit(self.config, self.budget))

    def decode_cache(self, context: Context) -> Cache:
        """See `Policy.decode_cache`; the cache is a `QuestCache`."""
        return context.cache.fork(self.config)
