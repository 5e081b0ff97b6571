"""What transformers and others raise about a model's files, as one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from questkv.errors import MissingPackageError, ModelError, QuestKVError
from questkv.models.find import ALIASES

_LONGEST = 400


@contextlib.contextmanager
def foreign_files(name: str) -> Iterator[None]:
    """Turn whatever transformers, tokenizers or gguf raise about files that others made into one `ModelError`.

    There is no list of what they raise: a file may hold anything, and they check little of it. So only calls of theirs
    belong inside.

    Args:
        name: The model's, for the message.

    Raises:
        ModelError: One line.
        MissingPackageError: A package is needed.
        MemoryError: As it was raised, and torch's RuntimeError that means the same.
    """
    try:
        yield
    except (QuestKVError, MemoryError):
        raise
    except ImportError as error:
        raise MissingPackageError(f"model {name}: {first_line(error)}") from error
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # a Rust package's, which is no Exception
        if not (panic or isinstance(error, Exception)):
            raise
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        raise ModelError(_line(name, error)) from error


def _line(name: str, error: BaseException) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return (
            f"model {name}: it needs Python code of its own, which is run only where that is allowed: read the code, "
            "then give --trust-remote-code (trust_remote_code=True)"
        )
    if os.path.exists(name):
        return f"model {name}: can't be loaded: {first_line(error)}"
    return (
        f"model {name}: {first_line(error)}; check the name, the network and your access to it, or use a local "
        f"folder, a .gguf file or {' or '.join(ALIASES)}"
    )


def first_line(error: BaseException) -> str:
    """What an error says, without the advice that follows on its other lines."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, KeyError | IndexError | ZeroDivisionError | AssertionError):
        text = f"{type(error).__name__}: {text}"  # theirs are a bare key, or nothing
    line = text.splitlines()[0].rstrip(".:,; ")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
