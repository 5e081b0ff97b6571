"""A prompt's form, read off templates as models have them."""

from __future__ import annotations

import pytest

from questkv.conversation.markup import begin_ids, markup_ids, text_ids
from questkv.evaluate.chat import Chat
from questkv.models import LoadedModel

SYSTEM = "{% if messages[0]['role'] != 'system' %}<s>system\nYou help.</s>\n{% endif %}"
TURNS = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
GENERATE = "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
BEGIN = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
# a model whose user turns don't look alike: only the first has an instruction before it
FIRST_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{% if loop.first %}Be brief. {% endif %}U: {{ m['content'] }}\n"
    "{% else %}A: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (SYSTEM + TURNS + GENERATE, "<s>user\n", "</s>\n<s>assistant\n"),
        (TURNS + GENERATE, "<s>user\n", "</s>\n<s>assistant\n"),
        (BEGIN + "{% if add_generation_prompt %}[assistant]{% endif %}", "<s>[user]", "</s>[assistant]"),
        (FIRST_ONLY, "U: ", "\nA: "),
        (None, "", ""),
    ],
)
def test_a_users_turn_is_found_without_the_templates_own_system_turn(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, template: str | None, before: str, after: str
) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    assert Chat.of(tiny.tokenizer) == Chat(before, after)


def test_markup_counts_in_templates_and_never_in_texts(tiny: LoadedModel) -> None:
    assert markup_ids(tiny.tokenizer, "<s>a") == [0, *text_ids(tiny.tokenizer, "a")]
    assert len(text_ids(tiny.tokenizer, "<s>a")) == 4
    assert markup_ids(tiny.tokenizer, "") == text_ids(tiny.tokenizer, "") == []


def test_no_begin_of_text_where_the_tokenizer_puts_none(tiny: LoadedModel) -> None:
    assert begin_ids(tiny.tokenizer) == []
