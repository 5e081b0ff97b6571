"""The errors questkv raises on purpose.

Each one is also the built-in error a caller would expect (`ValueError`, `MemoryError`, ...), so code that knows
nothing of questkv still catches it, and the command line turns every one into a single line. Messages read
``[operator] name: expected X, got Y``.
"""

from __future__ import annotations


class QuestKVError(Exception):
    """Base of every error that questkv raises on purpose."""


class ConfigError(QuestKVError, ValueError):
    """A `QuestConfig` field, or an environment variable, is unknown or holds an impossible value."""


class PoolFullError(QuestKVError, MemoryError):
    """The page pool can't hold the tokens asked for: its limit, or the machine's memory, is reached.

    The sequences are as they were before the call.
    """


class CacheMismatchError(QuestKVError, RuntimeError):
    """The `questkv` attention function met another cache, or a `QuestCache` another attention function."""


class UnsupportedError(QuestKVError, NotImplementedError):
    """A model or an option that questkv doesn't implement; never answered by a silent dense fallback."""


class MissingPackageError(QuestKVError, ImportError):
    """An optional package is needed; the message holds the command that installs it."""


class ModelError(QuestKVError, OSError):
    """A model can't be found, read or used."""


class DocumentError(QuestKVError, OSError):
    """A document can't be read, or doesn't fit the model's context."""


class ResultsError(QuestKVError, OSError):
    """A folder of evaluation results can't be read, written or continued."""


class OutputError(QuestKVError, OSError):
    """A result can't be written where it was asked for."""
