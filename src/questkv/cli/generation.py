"""How an answer is generated: the command decides, not the file that lies beside the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

# How a token is drawn: the model's own wishes, for --temperature above 0.
_SAMPLING = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# What the command's options say, what only changes the form of a result, and what doesn't reach a decoder.
_OPTIONS = ("temperature", "do_sample", "max_length", "max_new_tokens", "compile_config", "disable_compile")
_FORM = ("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate")
_TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version")
# Numbers that say how another way of generating works; the way itself is named by another field.
_DETAILS = (
    "early_stopping",
    "length_penalty",
    "num_beam_groups",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "target_lookbehind",
    "cache_config",
    "max_cache_len",
)


@dataclass(frozen=True)
class Generation:
    """What is taken over of a model's generation config.

    Attributes:
        ends: Tokens that end an answer.
        kept: Fields that `greedy` and `sampled` hold besides.
        sampling: Fields that only `sampled` holds.
        dropped: Fields that the command overrides, as ``name value``.
    """

    ends: tuple[int, ...]
    kept: dict[str, Any]
    sampling: dict[str, Any]
    dropped: tuple[str, ...]

    @classmethod
    def of(cls, model: Any, tokenizer: Any, end_of_turn: int | None) -> Generation:
        """Choose from `model.generation_config`.

        An answer is one sequence, whose tokens are chosen one by one by the paged cache's logits: beams, penalties
        (which would count the document's words), drafts and other caches don't belong to it. Tokens that may not be
        generated and what ends an answer do.

        Args:
            model: A causal language model of transformers.
            tokenizer: Its tokenizer.
            end_of_turn: The token that the chat template writes behind an answer.
        """
        given = model.generation_config
        size = model.config.get_text_config(decoder=True).vocab_size
        ends = end_tokens(given.eos_token_id, size)
        if len(ends) < 2:  # several were chosen with care: some models end a part of an answer as others end a turn
            config = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
            more = (config, tokenizer.eos_token_id, end_of_turn)
            ends = tuple(dict.fromkeys((*ends, *(end for one in more for end in end_tokens(one, size)))))
        kept = {name: value for name in _KEPT if (value := _valid(name, getattr(given, name, None), size)) is not None}
        sampling = {name: value for name in _SAMPLING if (value := getattr(given, name, None)) is not None}
        apart = {*_SAMPLING, *_OPTIONS, *_FORM, *_TOKENS, *_DETAILS, *kept}
        neutral = _neutral()
        dropped = tuple(
            f"{name} {value}"
            for name, value in sorted(given.to_dict().items())
            if name in neutral
            and name not in apart
            and value != neutral[name]
            and (value or (name, value) == ("use_cache", False))
        )
        return cls(ends, kept, sampling, dropped)

    def config(self, temperature: float = 0.0, max_new_tokens: int | None = None) -> GenerationConfig:
        """The likeliest tokens for temperature 0, else tokens that are drawn."""
        sampling = {"do_sample": True, "temperature": temperature, **self.sampling} if temperature > 0 else {}
        return GenerationConfig(
            eos_token_id=list(self.ends) or None,
            pad_token_id=self.ends[0] if self.ends else 0,  # one sequence has no padding; generate() wants one
            use_cache=True,
            max_new_tokens=max_new_tokens,
            **self.kept,
            **sampling,
        )

    def note(self) -> str:
        """What a person should know of it; empty where nothing was dropped."""
        if not self.dropped:
            return ""
        return (
            f"the model's generation config asks for {', '.join(self.dropped)}; an answer is generated without, token "
            "by token from the paged cache"
        )


def end_tokens(value: Any, vocabulary: int) -> tuple[int, ...]:
    """The ids in an ``eos_token_id``, which may be a number, several, missing or wrong."""
    several = value if isinstance(value, list | tuple) else [value]
    return tuple(one for one in several if _is_token(one, vocabulary))


def _is_token(value: Any, vocabulary: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary


def _valid(name: str, value: Any, vocabulary: int) -> Any:
    """The value of a field that is kept, None where `generate` would fail with it."""
    if not value:
        return None
    if name == "stop_strings":
        several = [value] if isinstance(value, str) else value
        good = isinstance(several, list | tuple) and all(isinstance(one, str) and one for one in several)
    else:
        # bad_words_ids holds lists of tokens, the others tokens
        rows: Iterable[Any] = value if name == "bad_words_ids" else [value]
        good = isinstance(value, list | tuple) and all(
            isinstance(row, list | tuple) and len(row) > 0 and all(_is_token(one, vocabulary) for one in row)
            for row in rows
        )
    return value if good else None


def _neutral() -> dict[str, Any]:
    """Every field and the value that changes nothing."""
    plain = GenerationConfig()
    defaults: dict[str, Any] = getattr(plain, "_get_default_generation_params", dict)()
    values = {name: defaults.get(name, value) for name, value in vars(plain).items() if not name.startswith("_")}
    return {**values, "guidance_scale": 1.0}


# What says which tokens may not come, and where an answer ends.
_KEPT = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings")
