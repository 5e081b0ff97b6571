"""Fitting a `QuestConfig` to a budget of an evaluation, however small."""

from __future__ import annotations

from dataclasses import replace

from questkv.config import QuestConfig


def fit(config: QuestConfig, budget: int) -> QuestConfig:
    """`config` with that token budget, and with fewer forced pages where they would take more than it.

    `QuestConfig` refuses a budget below sink + recent + open page (96 tokens by default). The paper evaluates smaller
    ones. Below that limit the forced pages may take half of the budget, the open page first, then the sink, then the
    recent ones; a budget that the config takes as it is changes nothing.

    Raises:
        ConfigError: The budget is smaller than a page.
    """
    if budget >= config.smallest_budget:
        return replace(config, token_budget=budget)
    room = max(budget // config.page_size // 2 - 1, 0)
    sink = min(config.sink_pages, room)
    recent = min(config.recent_pages, room - sink)
    return replace(
        config,
        token_budget=budget,
        sink_tokens=sink * config.page_size,
        recent_tokens=recent * config.page_size,
    )
