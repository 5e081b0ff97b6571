"""A GGUF file's header, read with every length checked against the file before it is followed.

The gguf package's reader trusts the file: a cut or altered one ends in whatever numpy or struct raise there, or in an
array as large as a damaged count says. So this reader goes first, and lets the other see sound headers only. The
format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from questkv.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST_NAME = 65_535
_MOST_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
# Counts that sizes are made of before a tensor's shape is compared with them; each is far above any model's.
_LIMITS = {"context_length": 2**31 - 1, "expert_count": 2**16, "rope.dimension_count": 2**16}


class Array(NamedTuple):
    """An array among the metadata; its items stay in the file."""

    kind: int
    items: int


class Tensor(NamedTuple):
    """A tensor's place in the file.

    Attributes:
        shape: As numpy has it: the last axis is contiguous.
        kind: Number of its GGML type.
        offset: Bytes from the file's start.
        size: Bytes.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a sound GGUF file says of itself.

    Attributes:
        path: The file.
        byte_order: ``<`` or ``>``, as in struct.
        values: Metadata by key: numbers, bools, strings and `Array`.
        tensors: By name.
    """

    path: Path
    byte_order: str
    values: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        """Llama.cpp's name of the kind of model."""
        return str(self.values["general.architecture"])

    def number(self, key: str) -> float | None:
        """A number that the architecture's metadata hold, None where they don't.

        Raises:
            ModelError: It isn't a finite number.
        """
        value = self.values.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if isinstance(value, bool | str | Array) or not math.isfinite(value):
            raise damaged(self.path, f"expected a finite number as {self.architecture}.{key}, got {value!r}")
        return float(value)

    def floats(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """A small tensor of 32-bit floats, None where the file has none of that name.

        Raises:
            ModelError: It is of another type, has several axes, or can't be read.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.kind != 0 or len(tensor.shape) != 1:
            raise damaged(self.path, f"expected 32-bit floats along one axis as {name}")
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.offset)
                read = file.read(tensor.size)
        except OSError as error:
            raise ModelError(f"model {self.path}: {error.strerror}") from None
        return np.frombuffer(read, f"{self.byte_order}f4").astype(np.float64)


def damaged(path: Path, what: str) -> ModelError:
    """The error for a file whose content can't be right."""
    return ModelError(f"model {path}: can't be loaded: damaged GGUF file: {what}")


def read_header(path: Path) -> Header:
    """Read and check a header.

    Raises:
        ModelError: The file can't be read, is no GGUF file of a known version, is cut short, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            start = file.read(24)
            if start[:4] != _MAGIC:
                raise ModelError(f"model {path}: can't be loaded: it is no GGUF file (it doesn't begin with GGUF)")
            if len(start) < 24:
                raise damaged(path, "it ends inside its header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).header()
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"model {path}: {error.strerror or error}") from None


class _Reader:
    """Walks through a header once."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        from gguf.constants import GGML_QUANT_SIZES

        self.path = path
        self.content = content
        self.size = len(content)
        self.at = 4
        self.order = "<"
        # by a type's number: values a block, bytes a block
        self.block_sizes: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}

    def header(self) -> Header:
        version = self.scalar("I")
        if version & 0xFFFF == 0:
            self.order, self.at = ">", 4
            version = self.scalar("I")
        if version not in _VERSIONS:
            raise ModelError(
                f"model {self.path}: can't be loaded: expected a GGUF file of version 2 or 3, got {version}"
            )
        tensor_count, value_count = self.scalar("Q"), self.scalar("Q")
        # each takes bytes of its own: a key's length, a type and a value; a name's length, axes, a type and an offset
        self.expect(value_count * 13 + tensor_count * 24)
        values: dict[str, Any] = {}
        for _ in range(value_count):
            key = self.name("a key")
            if key in values:
                raise damaged(self.path, f"the key {key!r} twice")
            values[key] = self.value(self.scalar("I"))
        self.check_values(values, tensor_count)
        found = [self.tensor() for _ in range(tensor_count)]
        alignment = values.get(_ALIGNMENT, 32)
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, tensor in found:
            if name in tensors:
                raise damaged(self.path, f"the tensor {name!r} twice")
            placed = tensor._replace(offset=start + tensor.offset)
            if placed.offset + placed.size > self.size:
                raise damaged(self.path, f"the tensor {name!r} ends behind the file's end; was it downloaded whole?")
            tensors[name] = placed
        self.check_layers(values, tensors)
        return Header(self.path, self.order, values, tensors)

    def check_values(self, values: dict[str, Any], tensors: int) -> None:
        alignment = values.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise damaged(self.path, f"expected a power of two as {_ALIGNMENT}, got {alignment!r}")
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str):
            raise damaged(self.path, "it names no architecture")
        for key, most in {**_LIMITS, "block_count": tensors}.items():
            value = values.get(f"{architecture}.{key}", 0)
            if isinstance(value, int) and not 0 <= value <= most:
                raise damaged(self.path, f"expected at most {most:,} as {architecture}.{key}, got {value:,}")

    def check_layers(self, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Check what transformers would else take from its defaults, or leave out, without a word."""
        architecture = values["general.architecture"]
        attends = any(".attn_" in name for name in tensors)
        for key in ("context_length", "embedding_length", "block_count", *(["attention.head_count"] * attends)):
            if f"{architecture}.{key}" not in values:
                raise damaged(self.path, f"it lacks {architecture}.{key}")
        numbers = [name.split(".", 2)[1] for name in tensors if name.startswith("blk.")]
        if not all(number.isdecimal() for number in numbers):
            raise damaged(self.path, "a tensor of a layer without a number")
        layers = max((int(number) + 1 for number in numbers), default=0)
        if numbers and values[f"{architecture}.block_count"] != layers:
            raise damaged(
                self.path, f"{layers} layers, and {values[f'{architecture}.block_count']} as {architecture}.block_count"
            )

    def expect(self, size: int) -> None:
        """Check that so many bytes are left."""
        if size > self.size - self.at:
            raise damaged(self.path, "it ends inside its header")

    def scalar(self, code: str) -> Any:
        form = self.order + code
        self.expect(struct.calcsize(form))
        (value,) = struct.unpack_from(form, self.content, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> bytes:
        length = self.scalar("Q")
        self.expect(length)
        self.at += length
        return self.content[self.at - length : self.at]

    def text(self, what: str) -> str:
        try:
            return self.string().decode()
        except UnicodeDecodeError:
            raise damaged(self.path, f"{what} that is no UTF-8") from None

    def name(self, what: str) -> str:
        name = self.text(what)
        if len(name) > _LONGEST_NAME:
            raise damaged(self.path, f"{what} of {len(name):,} characters")
        return name

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text("a string")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise damaged(self.path, f"a value of the unknown type {kind}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            size = count * struct.calcsize(self.order + _SCALARS[item])
            self.expect(size)
            self.at += size
        elif item == _STRING:
            self.expect(8 * count)
            self.skip_strings(count)
        else:
            raise damaged(self.path, f"an array of the unknown type {item}")
        return Array(item, count)

    def skip_strings(self, count: int) -> None:
        """Pass over strings, of which a vocabulary has hundreds of thousands."""
        length_of = struct.Struct(f"{self.order}Q").unpack_from
        at, last = self.at, self.size - 8
        for _ in range(count):
            if at > last:
                raise damaged(self.path, "it ends inside its header")
            at += 8 + length_of(self.content, at)[0]
        self.expect(at - self.at)
        self.at = at

    def tensor(self) -> tuple[str, Tensor]:
        """A tensor's description; its offset is still that from the first tensor's."""
        name = self.name("a tensor's name")
        axes = self.scalar("I")
        if not 1 <= axes <= _MOST_DIMENSIONS:
            raise damaged(self.path, f"the tensor {name!r} with {axes:,} axes")
        shape = tuple(self.scalar("Q") for _ in range(axes))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        sizes = self.block_sizes.get(kind)
        if sizes is None:
            raise damaged(self.path, f"the tensor {name!r} of the unknown type {kind}")
        block, block_bytes = sizes
        if 0 in shape or shape[-1] % block:
            raise damaged(self.path, f"the tensor {name!r} of the shape {shape}")
        return name, Tensor(shape, kind, offset, math.prod(shape) // block * block_bytes)
