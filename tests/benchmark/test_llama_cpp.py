"""llama.cpp as another decoder: it stands behind the same context as transformers and says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from questkv.benchmark.decode_contents import make_contents
from questkv.benchmark.decoders import ModelDecoder, dynamic_cache
from questkv.benchmark.llama_cpp import Filler, LlamaCpp, convert
from questkv.errors import ModelError
from questkv.models import load_model
from tiny_gguf import write_tiny_gguf

pytest.importorskip("llama_cpp", reason="llama.cpp is timed only where llama-cpp-python is installed")
BLOCK = 64


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(tmp_path / "cache"))
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def expected(model: Any, ids: list[int], context: int, steps: int) -> list[torch.Tensor]:
    """Transformers' logits [vocabulary] of the tokens behind `context`."""
    with torch.inference_mode():
        contents = make_contents(model, ids[:context], BLOCK)
        decoder = ModelDecoder("", model, "sdpa", dynamic_cache(model, contents.at(context)))
        return [decoder.step(token).clone() for token in ids[context : context + steps]]


@pytest.mark.parametrize("rope_factor", [1.0, 2.0])
def test_blocks_are_joined_and_steps_forgotten(file: Path, rope_factor: float) -> None:
    model = load_model(str(file), dtype="float32", rope_factor=rope_factor, device="cpu").model
    ids = torch.randint(2, 30, (230,)).tolist()
    engine, other = (
        LlamaCpp("llama.cpp", file, tokens=230, block=BLOCK, threads=1, rope_factor=rope_factor) for _ in range(2)
    )
    filler = Filler([engine, other])
    # within a block, in the middle of the third, and at the end of one, each behind steps that don't count
    for context in (40, 150, 192):
        filler.fill(ids[:context])
        for logits, token in zip(expected(model, ids, context, 3), ids[context:], strict=False):
            got = engine.step(token).clone()
            assert torch.equal(got, other.step(token))
            # llama.cpp rounds keys to float16. Weights are standard normal, so a key's products reach some 100, which
            # 2 ** -11 changes by .05, and a softmax weight by as much; a wrong position changes everything.
            assert float((got - logits).abs().max() / logits.abs().max()) < 0.05
    for held in (filler, engine, other):
        held.close()


def test_a_file_is_converted_once_and_says_its_type(file: Path, tmp_path: Path) -> None:
    made = convert(file, torch.bfloat16, tmp_path / "kept")
    time = made.stat().st_mtime_ns
    assert convert(file, torch.bfloat16, tmp_path / "kept") == made
    assert made.stat().st_mtime_ns == time
    assert not list((tmp_path / "kept").glob("*.partial"))
    engine = LlamaCpp(None, made, tokens=32, block=BLOCK, threads=1)
    assert engine.name == "llama.cpp:bf16"
    engine.close()


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "none.gguf"
    file.write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"none\.gguf: llama\.cpp can't load it"):
        LlamaCpp(None, file, tokens=32, block=BLOCK, threads=1)
    with pytest.raises(ModelError, match=r"llama\.cpp can't write it in float32"):
        convert(file, torch.float32, tmp_path)


def test_one_block_is_a_prefill_bit_for_bit_also_with_a_stretched_context(file: Path) -> None:
    ids = torch.randint(2, 30, (61,)).tolist()
    engine, plain = (LlamaCpp("llama.cpp", file, tokens=64, block=BLOCK, threads=1, rope_factor=2.0) for _ in range(2))
    filler = Filler([engine])
    filler.fill(ids[:60])
    plain.room.run(ids[:60], 0, 0)
    plain.position = 60
    assert torch.equal(engine.step(ids[60]), plain.step(ids[60]))
    for held in (filler, engine, plain):
        held.close()


def test_a_prompt_is_read_from_its_start_and_what_came_before_is_forgotten(file: Path) -> None:
    model = load_model(str(file), dtype="float32", device="cpu").model
    engine = LlamaCpp("llama.cpp", file, tokens=230, block=230, threads=1)
    for ids in (torch.randint(2, 30, (230,)).tolist(), torch.randint(2, 30, (41,)).tolist()):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        # as above: keys are rounded to float16
        assert float((engine.read(ids) - logits).abs().max() / logits.abs().max()) < 0.05
    engine.close()
