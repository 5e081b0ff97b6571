"""Quest and the methods it is compared with, on one prefilled context and through the same model.

`full` and `quest` decode from pages with the real kernels. The others are small PyTorch caches: the eviction methods
(`streaming_llm`, `h2o`, `tova`, `snapkv`) really drop tokens, the oracles select with the true attention.

Example:
    >>> loaded = load_model(attention="questkv")
    >>> context = prefill_context(loaded.model, ids, QuestConfig())
    >>> for method in METHODS:
    ...     policy = make_policy(method, 256 if policy_class(method).uses_budget else None)
    ...     logits = decode(loaded.model, policy.decode_cache(context), question)
"""

from questkv.policies.context import Context, prefill_context
from questkv.policies.decoding import decode, greedy
from questkv.policies.full import Full
from questkv.policies.h2o import H2O
from questkv.policies.oracle import Oracle, OracleTokens
from questkv.policies.policy import Policy
from questkv.policies.quest import Quest
from questkv.policies.registry import METHODS, make_policy, policy_class
from questkv.policies.snapkv import SnapKV
from questkv.policies.statistics import Statistics
from questkv.policies.streaming_llm import StreamingLLM
from questkv.policies.tova import TOVA

__all__ = [
    "H2O",
    "METHODS",
    "TOVA",
    "Context",
    "Full",
    "Oracle",
    "OracleTokens",
    "Policy",
    "Quest",
    "SnapKV",
    "Statistics",
    "StreamingLLM",
    "decode",
    "greedy",
    "make_policy",
    "policy_class",
    "prefill_context",
]
