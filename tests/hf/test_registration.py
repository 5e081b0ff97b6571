"""Importing questkv.hf adds one name to transformers' registries and changes nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from questkv.hf import register
from questkv.hf.attention import NAME, questkv_attention, questkv_mask

_IN_A_FRESH_PROCESS = """
import sys
import pytest
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING as layers

def state():
    return dict(attentions._global_mapping), dict(masks._global_mapping), dict(layers)

import questkv
assert "questkv.hf" not in sys.modules
before = state()
generate = transformers.GenerationMixin.generate
import questkv.hf
after = state()
assert after[0].pop("questkv") and after[1].pop("questkv")
assert after == before
assert transformers.GenerationMixin.generate is generate
import importlib
importlib.reload(questkv.hf)
again = state()
assert again[0].pop("questkv") and again[1].pop("questkv")
assert again == before
print("as it was")
"""


@pytest.mark.slow
def test_importing_adds_one_name_and_changes_nothing_else_even_twice() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_A_FRESH_PROCESS], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "as it was", done.stderr


def test_the_name_is_known_to_both_registries() -> None:
    # A name without a mask function gets no mask at all, silently.
    register()
    assert ALL_ATTENTION_FUNCTIONS[NAME] is questkv_attention
    assert ALL_MASK_ATTENTION_FUNCTIONS[NAME] is questkv_mask
    assert NAME in AttentionInterface().valid_keys()
    assert NAME in AttentionMaskInterface().valid_keys()


def test_the_name_holds_no_part_that_transformers_takes_for_another() -> None:
    assert not any(part in NAME for part in ("flash", "sdpa", "flex_attention", "eager", "paged"))
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=9)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
