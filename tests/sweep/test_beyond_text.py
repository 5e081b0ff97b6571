"""Models that read more than text, given text only, and encoder-decoder models."""

from __future__ import annotations

import pytest
from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from questkv import attach
from questkv.errors import UnsupportedError
from sweep.probe import outcome
from sweep.tiny_models import tiny_model

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "llava",
        "llava_next",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "gemma3",
        "mllama",
        "internvl",
        "idefics3",
        "smolvlm",
    ],
)
def test_a_vision_language_model_reads_plain_text(model_type: str) -> None:
    assert outcome(model_type, AutoModelForImageTextToText).kind == "works"


def test_a_model_whose_prompt_sees_itself_whole_is_refused() -> None:
    found = outcome("paligemma", AutoModelForImageTextToText)
    assert (found.kind, found.reason) == ("refused", "doesn't say that its attention is causal")


@pytest.mark.parametrize("model_type", ["t5", "bart", "mbart", "m2m_100"])
def test_an_encoder_decoder_model_is_refused_when_it_is_attached(model_type: str) -> None:
    model, _ = tiny_model(model_type, AutoModelForSeq2SeqLM)
    with pytest.raises(UnsupportedError, match=rf"decoder-only.*got {type(model).__name__}, an encoder-decoder"):
        attach(model).__enter__()
