"""Which methods run with which budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from questkv.config import QuestConfig
from questkv.errors import ConfigError
from questkv.policies import METHODS, Oracle, Policy, Quest, make_policy, policy_class


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One method with one budget, ready to run.

    Attributes:
        method: Its name.
        budget: Tokens held or read per KV head; None for a method that has no budget.
        policy: What runs.
        lowered: ``sink_tokens`` and ``recent_tokens`` of the policy where the budget had no room for the configured
            ones (`questkv.policies.budget.fit`), else empty.
    """

    method: str
    budget: int | None
    policy: Policy
    lowered: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every method with every budget; a method without a budget runs once.

    Attributes:
        methods: Names out of `questkv.policies.METHODS`.
        budgets: Tokens held or read per KV head.
        quest: Page size, optimism, group rule and the forced tokens; its own budget isn't used.

    Raises:
        ConfigError: An unknown method, a repeated one, or a budget that a method can't work with.
    """

    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    quest: QuestConfig

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(f"[eval] methods: expected some of {', '.join(METHODS)}, got {method!r}")
        for name, values in (("methods", self.methods), ("budgets", self.budgets)):
            if len(set(values)) < len(values):
                raise ConfigError(f"[eval] {name}: expected each once, got {', '.join(map(str, values))}")
        if not self.methods:
            raise ConfigError(f"[eval] methods: expected some of {', '.join(METHODS)}, got none")
        if not self.budgets and any(policy_class(method).uses_budget for method in self.methods):
            raise ConfigError("[eval] budgets: expected at least one, got none")
        list(self.entries())  # every policy checks its own budget

    def entries(self) -> Iterator[Planned]:
        """Method by method, budgets in the order given."""
        for method in self.methods:
            for budget in self.budgets if policy_class(method).uses_budget else (None,):
                policy = make_policy(method, budget, self.quest)
                yield Planned(method=method, budget=budget, policy=policy, lowered=self._lowered(policy))

    def _lowered(self, policy: Policy) -> dict[str, int]:
        if not isinstance(policy, Quest | Oracle):
            return {}
        forced = {name: getattr(policy.config, name) for name in ("sink_tokens", "recent_tokens")}
        return forced if any(forced[name] < getattr(self.quest, name) for name in forced) else {}
