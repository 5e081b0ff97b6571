"""Finding a model by alias, hub id, folder or GGUF file, and loading it with its tokenizer.

This layer stands beside `questkv.hf`: it knows nothing of pages, and takes the name of the attention function as an
argument. Importing it imports neither torch nor transformers.
"""

from questkv.models.context import context_length, stretch_context
from questkv.models.find import ALIASES, DEFAULT_MODEL, EmbeddedModel, find_model
from questkv.models.folder import LoadedModel
from questkv.models.load import DTYPES, WEIGHTS, load_model, pick_dtype
from questkv.models.place import is_private, model_cache_dir

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "DTYPES",
    "WEIGHTS",
    "EmbeddedModel",
    "LoadedModel",
    "context_length",
    "find_model",
    "is_private",
    "load_model",
    "model_cache_dir",
    "pick_dtype",
    "stretch_context",
]
