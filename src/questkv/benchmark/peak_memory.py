"""The memory that decoding or reading a prompt takes by itself: a process of its own for each implementation.

``python -m questkv.benchmark.peak_memory JSON`` is that process; it prints one JSON object.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from questkv.errors import QuestKVError

_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_STEPS = 3


class MeasurementError(QuestKVError, RuntimeError):
    """The process that was to measure something failed."""


@dataclass(frozen=True)
class Subject:
    """Whose memory is measured.

    Attributes:
        kind: ``questkv``, ``transformers`` or ``llama.cpp``.
        model: As for `load_model`; for llama.cpp a GGUF file.
        contexts: Ascending.
        dtype: As for `load_model`.
        rope_factor: Likewise.
        weights: Likewise.
        config: Of our cache.
        threads: CPU threads.
        block: Tokens a block of llama.cpp's contexts; None for the whole context.
        compiled: Whether our steps run as graphs of torch.compile.
        chunk: Tokens of our forwards where a prompt is read; None where tokens are decoded behind it.
        trust_remote_code: As for `load_model`.
    """

    kind: str
    model: str
    contexts: tuple[int, ...]
    dtype: str
    rope_factor: float
    weights: str
    config: dict[str, Any]
    threads: int
    block: int | None = None
    compiled: bool = False
    chunk: int | None = None
    trust_remote_code: bool = False


def is_possible() -> bool:
    """Whether this system tells a process its peak and lets it start again: Linux."""
    return _STATUS.exists() and _RESET_PEAK.exists()


def measure(subject: Subject) -> dict[int, float]:
    """MiB at each context: the largest resident memory at work, loading and filling not counted.

    Raises:
        MeasurementError: The process failed.
    """
    command = [sys.executable, "-m", __name__, json.dumps(asdict(subject))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MeasurementError(f"[bench] peak memory of {subject.kind} {subject.weights}: the process failed: {last}")
    return {int(context): mib for context, mib in json.loads(done.stdout).items()}


def _main(subject: Subject) -> dict[int, float]:
    import torch

    torch.set_num_threads(subject.threads)
    of = _llama_cpp if subject.kind == "llama.cpp" else _model
    with torch.inference_mode():
        return of(subject)


def _llama_cpp(subject: Subject) -> dict[int, float]:
    """A context's memory is there from the start, so nothing needs to be filled."""
    from questkv.benchmark.llama_cpp import LlamaCpp

    peaks = {}
    for context in subject.contexts:
        engine = LlamaCpp(
            None,
            Path(subject.model),
            tokens=context + _STEPS,
            block=subject.block or context,
            threads=subject.threads,
            rope_factor=subject.rope_factor,
        )
        peaks[context] = _peak(partial(_decode, engine) if subject.chunk is None else partial(_read, engine, context))
        engine.close()
    return peaks


def _model(subject: Subject) -> dict[int, float]:
    from questkv.benchmark.decoders import ModelDecoder, dynamic_cache, quest_cache
    from questkv.benchmark.readers import quest_reader, sdpa_reader
    from questkv.config import QuestConfig
    from questkv.hf.linear_layers import make_linear_fast
    from questkv.models import load_model

    ours, config = subject.kind == "questkv", QuestConfig.from_dict(subject.config)
    model = load_model(
        subject.model,
        dtype=subject.dtype,
        rope_factor=subject.rope_factor,
        weights=subject.weights,
        trust_remote_code=subject.trust_remote_code,
    ).model
    if ours:
        make_linear_fast(model)
    peaks = {}
    for context in subject.contexts:
        if subject.chunk is not None:
            reader = quest_reader("", model, config, subject.chunk) if ours else sdpa_reader("", model)
            peaks[context] = _peak(partial(_read, reader, context))
            continue
        layers = _any_contents(model, context)
        cache = quest_cache(model, config, layers) if ours else dynamic_cache(model, layers)
        del layers
        compiled = ours and subject.compiled
        decoder = ModelDecoder("", model, "questkv" if ours else "sdpa", cache, compiled=compiled)
        peaks[context] = _peak(partial(_decode, decoder))
        del cache, decoder
    return peaks


def _any_contents(model: Any, context: int) -> Sequence[tuple[Any, Any]]:
    """Keys and values of the right size; one pair, since caches copy them."""
    import torch
    from transformers import DynamicCache

    from questkv.hf.prefill import prefill

    model.set_attn_implementation("sdpa")
    one: Any = DynamicCache(config=model.config)
    prefill(model, one, torch.zeros(1, 1, dtype=torch.int64))
    shapes = [(layer.keys.shape, layer.values.shape) for layer in one.layers]
    made: dict[Any, Any] = {}
    for shape in {shape for pair in shapes for shape in pair}:
        made[shape] = torch.randn(*shape[:2], context, shape[3], dtype=model.dtype)
    return [(made[keys], made[values]) for keys, values in shapes]


def _decode(decoder: Any) -> None:
    for token in range(_STEPS):
        decoder.prepare()
        decoder.step(token)


def _read(reader: Any, context: int) -> None:
    reader.read([0] * context)


def _peak(work: Callable[[], None]) -> float:
    """MiB while something works."""
    gc.collect()
    # What was freed after loading and filling, and the C library kept: as much as a cache, where that was copied.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    _RESET_PEAK.write_text("5", encoding="ascii")  # proc(5): the peak starts again from what is resident
    work()
    peak = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


if __name__ == "__main__":
    values: Mapping[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(_main(Subject(**{**values, "contexts": tuple(values["contexts"])}))))
