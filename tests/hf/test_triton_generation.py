"""A real model through transformers with the Triton backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from interpreter import has_triton, patch_once
from questkv import QuestConfig, attach
from questkv.models import LoadedModel

NOVEL = Path(__file__).parents[2] / "examples" / "sherlock_holmes.txt"


@pytest.mark.slow
@pytest.mark.skipif(not has_triton(), reason="triton isn't installed")
def test_four_tokens_after_three_hundred_are_those_of_the_reference(smollm2: LoadedModel) -> None:
    patch_once()
    ids = torch.tensor([smollm2.tokenizer(NOVEL.read_text(encoding="utf-8")[:2000])["input_ids"][:300]])
    ids = ids.to(smollm2.model.device)
    answers, reports = [], []
    for backend in ("triton", "reference"):
        config = QuestConfig(token_budget=96, sink_tokens=16, recent_tokens=16, backend=backend)
        with torch.inference_mode(), attach(smollm2.model, config) as attached:
            out = smollm2.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4, pad_token_id=2
            )
            answers.append(out[0, ids.shape[1] :].tolist())
            reports.append(attached.cache.report())
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]
    assert reports[0].pages_read == reports[1].pages_read < reports[0].pages_held
