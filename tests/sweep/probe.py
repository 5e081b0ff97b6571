"""What questkv does with a model of any class: the reference's tokens and logits, a refusal, or (a fault) another answer.

A tiny model of the class gets random weights, large enough that attention is peaked and every token depends on it. It
is asked with prompts of several pages, longer than its windows, with and without padding on the left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from questkv import QuestConfig, attach
from questkv.errors import QuestKVError
from sweep.tiny_configs import WORDS, tiny_config

FULL = QuestConfig(token_budget=1.0, page_size=16, dense_layers=0)
SPARSE = QuestConfig(token_budget=32, page_size=8, sink_tokens=8, recent_tokens=8, dense_layers=0)
NEW_TOKENS = 6
LENGTHS = (75, 50)
