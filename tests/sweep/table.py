"""The table of docs/models.md: what questkv does with every causal language model class of transformers.

PYTHONPATH=tests python -m sweep.table          # about a minute; writes docs/models.md
"""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sweep.probe import Outcome, outcome

MODELS = Path(__file__).parents[2] / "docs" / "models.md"
# Classes that can't be built small, and why. A class that is missing here must be built.
NOT_BUILT = {
    "blt": "transformers' own cache can't be made from its default configuration",
    "gemma3n": "its vision tower needs the package timm; its text model is `gemma3n_text`",
    "gemma4_assistant": "it drafts for another model and reads that one's cache",
    "gemma4_unified_assistant": "it drafts for another model and reads that one's cache",
    "musicgen": "it generates audio codes; the class can't be made from its own configuration",
    "musicgen_melody": "it generates audio codes; the class can't be made from its own configuration",
    "reformer": "transformers' own `generate` fails on it with prompts of several lengths",
}
_BEGIN, _END = "<!-- every class: written by `make models` -->", "<!-- end -->"


def names() -> dict[str, str]:
    """The class of every model type that transformers' mapping for causal language models knows."""
    found: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return found


def row(model_type: str, found: Outcome) -> str:
    """A class's line in the table."""
    what = {"works": "works", "refused": "refused", "not built": "not tried"}[found.kind]
    why = NOT_BUILT[model_type] if found.kind == "not built" else found.reason
    return f"| `{model_type}` | {what} | {'with `sliding_window=None`' if found.windowless and not why else why} |"


def summary(found: dict[str, Outcome]) -> list[str]:
    """The counts above the table."""
    kinds = Counter(each.kind for each in found.values())
    reasons = Counter(each.reason for each in found.values() if each.kind == "refused")
    lines = [f"Of the {len(found)} model types in transformers {transformers.__version__}, {kinds['works']} work, "]
    lines[0] += f"{kinds['refused']} are refused, and {kinds['not built']} could not be tried. Refused are:"
    lines += ["", "| model types | why: the class |", "|---|---|"]
    return lines + [f"| {count} | {reason} |" for reason, count in reasons.most_common()]


def written() -> dict[str, str]:
    """The lines of docs/models.md, by model type."""
    lines = MODELS.read_text().split(_BEGIN)[1].split(_END)[0].splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def version() -> str:
    """The version of transformers that docs/models.md was written with."""
    return MODELS.read_text().split("model types in transformers ")[1].split(",")[0]


def main() -> None:
    """Try every class and write the table."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {model_type: outcome(model_type) for model_type in names()}
    lines = [_BEGIN, "", *summary(found), "", "| model type | questkv | |", "|---|---|---|"]
    lines += [row(model_type, each) for model_type, each in found.items()]
    before, rest = MODELS.read_text().split(_BEGIN)
    MODELS.write_text(before + "\n".join([*lines, "", _END]) + rest.split(_END)[1])


if __name__ == "__main__":
    main()
