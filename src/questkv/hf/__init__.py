"""questkv in Hugging Face transformers. Importing this adds the attention name ``questkv`` to its registries."""

from questkv.hf.attachment import Attachment, attach
from questkv.hf.attention import register
from questkv.hf.cache import QuestCache
from questkv.hf.linear_layers import make_linear_fast
from questkv.hf.report import CacheReport, LayerReport

__all__ = ["Attachment", "CacheReport", "LayerReport", "QuestCache", "attach", "make_linear_fast", "register"]

register()
