"""GGUF files that are cut, altered or made to hurt: one line, no traceback, and no array as large as they say."""

from __future__ import annotations

import resource
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from questkv.errors import ModelError, QuestKVError, UnsupportedError
from questkv.models import load_model
from questkv.models.gguf.header import Array, read_header
from tiny_gguf import write_tiny_gguf

FILES, LOADED = 10_000, 60


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUESTKV_CACHE_DIR", str(tmp_path / "cache"))


def load(path: Path) -> Any:
    return load_model(str(path), dtype="float32", device="cpu").model


def refusal(path: Path) -> str:
    with pytest.raises(ModelError, match=rf"model .*{path.name}: ") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sound_header_says_what_the_gguf_package_says(tmp_path: Path) -> None:
    import gguf

    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=lambda writer: writer.add_bool("llama.x", True))
    header, reader = read_header(path), gguf.GGUFReader(str(path))
    assert header.values["llama.x"] is True
    for key, value in header.values.items():
        expected = reader.fields[key].contents()
        assert (
            value == Array(int(reader.fields[key].types[1]), len(expected))
            if key.endswith(("tokens", "token_type", "merges"))
            else value == expected
        ), key
    assert set(header.values) == {key for key in reader.fields if not key.startswith("GGUF.")}
    assert [(name, tensor.shape, tensor.offset, tensor.size) for name, tensor in header.tensors.items()] == [
        (tensor.name, tensor.data.shape, tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors
    ]


def test_a_file_of_the_other_byte_order_is_read(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(str(path), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_block_count(0)
    writer.add_tensor("rope_freqs.weight", np.arange(1, 5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert header.number("context_length") == 4096
    assert np.array_equal(header.floats("rope_freqs.weight"), [1, 2, 3, 4])


@pytest.mark.parametrize("length", [0, 1, 4, 10, 23, 24, 100, 1000, -1])
def test_a_file_cut_anywhere_is_one_line(tmp_path: Path, length: int) -> None:
    path = write_tiny_gguf(tmp_path / "cut.gguf")
    content = path.read_bytes()[:length]
    path.write_bytes(content)
    line = refusal(path)
    if length in (0, 1):
        assert "it is no GGUF file" in line
    elif length == -1:
        assert "ends behind the file's end; was it downloaded whole?" in line
    else:
        assert "damaged GGUF file: it ends inside its header" in line


def test_every_cut_of_a_header_is_one_line(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    data = read_header(path).tensors["token_embd.weight"].offset
    for length in range(data):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError):
            read_header(path)


def altered(path: Path, key: str, old: bytes, new: bytes) -> Path:
    """The file with the bytes behind a key, its type included, in place of others."""
    content = path.read_bytes()
    at = content.index(key.encode()) + len(key)
    assert content[at : at + len(old)] == old
    path.write_bytes(content[:at] + new + content[at + len(old) :])
    return path


@pytest.mark.parametrize(
    ("key", "old", "new", "message"),
    [
        ("general.architecture", struct.pack("<IQ", 8, 5), struct.pack("<IQ", 8, 2**63), "ends inside its header"),
        ("llama.context_length", struct.pack("<I", 4), struct.pack("<I", 77), "a value of the unknown type 77"),
        ("ggml.tokens", struct.pack("<IIQ", 9, 8, 30), struct.pack("<IIQ", 9, 8, 2**60), "ends inside its header"),
        ("ggml.tokens", struct.pack("<IIQ", 9, 8, 30), struct.pack("<IIQ", 9, 9, 30), "array of the unknown type 9"),
        ("ggml.token_type", struct.pack("<IIQ", 9, 5, 30), struct.pack("<IIQ", 9, 5, 2**50), "ends inside its header"),
        (
            "llama.block_count",
            struct.pack("<II", 4, 1),
            struct.pack("<II", 4, 2**31),
            "at most 11 as llama.",
        ),
        (
            "llama.block_count",
            struct.pack("<II", 4, 1),
            struct.pack("<II", 4, 0),
            "1 layers, and 0 as llama.block_count",
        ),
        ("attention.head_count", struct.pack("<II", 4, 4), struct.pack("<II", 4, 0), "."),
        ("embedding_length", struct.pack("<II", 4, 32), struct.pack("<II", 4, 2**32 - 1), "."),
        (
            "feed_forward_length",
            struct.pack("<II", 4, 64),
            struct.pack("<II", 4, 65),
            "its tensors don't fit",
        ),
        (
            "llama.vocab_size",
            struct.pack("<II", 4, 30),
            struct.pack("<II", 4, 2**31),
            "its tensors don't fit",
        ),
        ("token_embd.weight", struct.pack("<IQQ", 2, 32, 30), struct.pack("<IQQ", 2, 2**40, 2**40), "file's end"),
        ("token_embd.weight", struct.pack("<I", 2), struct.pack("<I", 2**31), "with 2,147,483,648 axes"),
        ("token_embd.weight", struct.pack("<IQQI", 2, 32, 30, 0), struct.pack("<IQQI", 2, 32, 30, 99), "type 99"),
    ],
)
def test_numbers_that_can_not_be_are_refused_before_they_are_followed(
    tmp_path: Path, key: str, old: bytes, new: bytes, message: str
) -> None:
    line = refusal(altered(write_tiny_gguf(tmp_path / "bad.gguf"), key, old, new))
    assert message in line


def test_an_unknown_architecture_and_a_vocabulary_too_short_are_one_line(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "other.gguf"
    for architecture, needle in (("nonesuch", "nonesuch"), ("llama", "")):
        writer = gguf.GGUFWriter(str(path), architecture)
        writer.add_context_length(10)
        writer.add_embedding_length(32)
        writer.add_block_count(0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert needle in refusal(path)


def test_what_transformers_would_take_from_its_defaults_or_leave_out_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "lacking.gguf")
    content = path.read_bytes()
    for key in ("llama.context_length", "llama.embedding_length", "llama.block_count", "llama.attention.head_count"):
        path.write_bytes(content.replace(key.encode(), key[:-1].encode() + b"X", 1))
        assert refusal(path).endswith(f"damaged GGUF file: it lacks {key}")
    biased = write_tiny_gguf(tmp_path / "biased.gguf", tensors={"blk.0.attn_q.bias": np.ones(32, np.float32)})
    with pytest.raises(UnsupportedError, match="transformers leaves out biases that the file has for llama"):
        load(biased)


def mutations(content: bytes, header: int, count: int) -> Iterator[bytes]:
    """Files with altered bytes, cut, spliced or with a number changed; most changes in the header's bytes."""
    rng = np.random.default_rng(0)
    extremes = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
    for index in range(count):
        mutated = bytearray(content)
        where = int(rng.integers(4, header if index % 8 else len(content) - 8))
        kind = index % 5
        if kind == 0:
            for at in rng.integers(4, header, int(rng.integers(1, 9))):
                mutated[at] = int(rng.integers(256))
        elif kind == 1:
            del mutated[int(rng.integers(len(content))) :]
        elif kind == 2:
            source = int(rng.integers(len(content) - 64))
            mutated[where : where + int(rng.integers(64))] = content[source : source + int(rng.integers(64))]
        elif kind == 3:
            mutated[where : where + 8] = struct.pack("<Q", extremes[int(rng.integers(len(extremes)))])
        else:
            mutated[where : where + 4] = struct.pack("<I", int(rng.integers(20)))
        yield bytes(mutated)


def outcome(act: Callable[[], object]) -> str:
    """``done``, or the line of an error of ours; anything else is the test's failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            act()
    except QuestKVError as error:
        return str(error)
    return "done"


@pytest.mark.long
def test_mutated_files_load_or_are_refused_in_one_line(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=lambda writer: writer.add_rope_scaling_factor(4.0))
    content = path.read_bytes()
    data = read_header(path).tensors["token_embd.weight"].offset
    load(path)  # what a first load takes is not the mutations'
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sound, lines = [], []
    for mutated in mutations(content, data, FILES):
        path.write_bytes(mutated)
        lines.append(outcome(lambda: read_header(path)))
        if lines[-1] == "done":
            sound.append(mutated)
    refused = FILES - len(sound)
    # what the header doesn't show: vocabularies, names and sizes that don't fit one another
    tried = sound[:: len(sound) // LOADED][:LOADED]
    for mutated in tried:
        path.write_bytes(mutated)
        lines.append(outcome(lambda: load(path)))
    loaded = lines[FILES:].count("done")
    print(f"{FILES} files: {refused} refused by their headers; of {len(tried)} others {loaded} loaded")
    assert not [line for line in lines if "\n" in line]
    assert min(refused, len(tried) - loaded, loaded) > 10  # else the mutations try only one of them
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 512 * 1024  # KiB on Linux
