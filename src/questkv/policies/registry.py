"""Policies by the names that the commands and the results use."""

from __future__ import annotations

from questkv.config import QuestConfig
from questkv.errors import ConfigError
from questkv.policies.eviction import EvictionPolicy
from questkv.policies.full import Full
from questkv.policies.h2o import H2O
from questkv.policies.oracle import Oracle, OracleTokens
from questkv.policies.policy import Policy
from questkv.policies.quest import Quest
from questkv.policies.snapkv import SnapKV
from questkv.policies.streaming_llm import StreamingLLM
from questkv.policies.tova import TOVA

_CLASSES: tuple[type[Policy], ...] = (Full, Quest, Oracle, OracleTokens, StreamingLLM, H2O, TOVA, SnapKV)
_POLICIES = {policy.name: policy for policy in _CLASSES}
METHODS = tuple(_POLICIES)


def policy_class(method: str) -> type[Policy]:
    """The class behind a name: its `uses_budget` and `observes` are known before a budget is.

    Raises:
        ConfigError: No such method.
    """
    if method not in _POLICIES:
        raise ConfigError(f"[make_policy] method: expected one of {', '.join(METHODS)}, got {method!r}")
    return _POLICIES[method]


def make_policy(method: str, budget: int | None = None, quest: QuestConfig | None = None) -> Policy:
    """A method by name, with its paper's settings.

    Args:
        method: One of `METHODS`.
        budget: Tokens, None for `full`.
        quest: What `quest` and `oracle` run with, but for the budget; its `dense_layers` hold for every method.

    Raises:
        ConfigError: No such method, or a budget that it can't have.
    """
    policy = policy_class(method)
    config = quest if quest is not None else QuestConfig()
    if issubclass(policy, Quest | Oracle):
        return policy(budget=budget, config=config)
    if issubclass(policy, OracleTokens | EvictionPolicy):
        return policy(budget=budget, dense_layers=config.dense_layers)
    return policy(budget=budget)
