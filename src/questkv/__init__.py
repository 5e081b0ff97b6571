"""questkv: long-context decoding that reads only the KV-cache pages a token's query needs (Quest, arXiv 2406.10774).

Importing the package imports neither torch nor transformers; `QuestCache` and `attach` do when first used, and
thereby add the attention name ``questkv`` to transformers' registries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from questkv.config import QuestConfig

if TYPE_CHECKING:
    from questkv.hf import QuestCache, attach

__version__ = "0.1.0"
__all__ = ["QuestCache", "QuestConfig", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name in ("QuestCache", "attach"):
        from questkv import hf

        return getattr(hf, name)
    raise AttributeError(f"module 'questkv' has no attribute {name!r}")
