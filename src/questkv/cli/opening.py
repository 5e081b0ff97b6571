"""From options to a session that has read its document: what `ask` and `chat` do first."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from questkv.cli import options, output
from questkv.cli.compiled import keep_compiled
from questkv.cli.long_document import left_out, shorten
from questkv.config import QuestConfig
from questkv.models import context_length, find_model

if TYPE_CHECKING:
    from questkv.cli.session import Session


@dataclass(frozen=True)
class Opening:
    """How to load a model and what to do with a document that doesn't fit it."""

    model: str
    config: QuestConfig
    dtype: str
    weights: str
    rope_factor: float
    threads: int | None
    seed: int
    tail: bool
    max_new_tokens: int
    compile: bool = False
    trust_remote_code: bool = False

    def load(self) -> Session:
        """Import torch and transformers, quietly, and load the model."""
        found = find_model(self.model)  # before the slow imports, so that a wrong name fails at once
        options.check_offload(self.config)
        output.quiet_libraries()
        if self.compile:
            keep_compiled()
        # a hub id may have to be downloaded, which draws progress bars of its own
        with output.busy(f"Loading {self.model}") if isinstance(found, Path) else contextlib.nullcontext():
            from questkv.cli import session

            output.quiet_progress_bars()
            loaded = session.Session.open(
                self.model,
                self.config,
                dtype=self.dtype,
                weights=self.weights,
                rope_factor=self.rope_factor,
                threads=self.threads,
                compile=self.compile,
                trust_remote_code=self.trust_remote_code,
            )
        if self.compile:
            with output.busy("Compiling the decode step"):
                loaded.compile_step()
        session.seed(self.seed)
        return loaded

    def read(self, session: Session, document: str, text: str, question_tokens: int) -> None:
        """Prefill the document, leaving room for a question of so many tokens and its answer.

        Raises:
            DocumentError: It doesn't fit the model's context, and cutting it was not asked for.
        """
        part = shorten(text, context_length(session.model.config), session.tokenizer, tail=self.tail)
        before, ids = session.prompter.document(part.text)
        fitted = session.fit(len(before), ids, question_tokens, self.max_new_tokens, tail=self.tail)
        if fitted.left_out:
            output.note(left_out(part, len(ids), fitted.left_out))
        total = len(before) + len(fitted.ids)
        with output.token_progress(f"Reading {options.document_label(document)}", total) as on_progress:
            session.read(before + fitted.ids, on_progress)
