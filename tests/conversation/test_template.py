"""Chat templates that work in other ways than most, and some that don't work."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from questkv.cli.prompt import Conversation
from questkv.conversation.template import ChatTemplate, TemplateError

TURNS = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(["<s>", "</s>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('No chat today') }}", "No chat today"),
        ("{% for m in messages %}{{ m['content'] }}", "end of template"),
        ("{{ messages[0]['content'] + none }}", "NoneType"),
        ("{{ 1 // 0 }}", "zero"),
        ("<s>system\nYou help.</s>", "it leaves out what the user says"),
        ("{% if messages[0]['role'] != 'system' %}{{ raise_exception('a\n\nb') }}{% endif %}", "a b"),
    ],
)
def test_a_template_that_cant_be_used_is_one_line(template: str, reason: str) -> None:
    with pytest.raises(TemplateError) as raised:
        ChatTemplate.of(tokenizer(template))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.warns(UserWarning, match="chat template can't be used") as warned:
        talk = Conversation(tokenizer(template))
    assert len(warned) == 1
    talk.document = "A lamp."
    text = "A lamp.\n\nQuestion: Who?\nAnswer:"
    assert talk.prompt("Who?").ids == tokenizer(None)(text)["input_ids"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for part in m['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}</s>{% endfor %}",
        "{% for m in messages %}{{ m['content'][0]['text'] }}</s>{% endfor %}",
    ],
)
def test_contents_in_parts(template: str) -> None:
    found = ChatTemplate.of(tokenizer(template))
    assert found is not None
    assert found.parts
    assert found.render([("user", "A lamp.")]) == "A lamp.</s>"


@pytest.mark.parametrize("change", ["trim", "upper", "replace('-', ' ')", "replace('\\n', '')"])
def test_a_template_that_changes_the_text_is_used_as_it_is(change: str) -> None:
    own = tokenizer(TURNS.replace("m['content']", f"m['content'] | {change}"))
    talk = Conversation(own)
    talk.document = " the-lamp \n"
    wanted = own.apply_chat_template([{"role": "user", "content": " the-lamp \n\n\nWho?"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert talk.prompt("Who?").ids == wanted


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if messages | length > 1 %}{{ raise_exception('One turn') }}{% endif %}" + TURNS, "One turn"),
        ("{{ messages[-1]['content'] }}", "it leaves out the first or the last question"),
        ("{{ messages[0]['content'] }}", "it leaves out the first or the last question"),
        (TURNS, ""),
    ],
)
def test_templates_of_one_turn(template: str, reason: str) -> None:
    found = ChatTemplate.of(tokenizer(template))
    assert found is not None
    assert found.one_turn == reason


def test_no_template() -> None:
    assert ChatTemplate.of(tokenizer(None)) is None


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TURNS, 1),
        (TURNS.replace("</s>", ""), 0),  # the next turn's header ends this one
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
        (TURNS.replace("m['content']", "m['content'] | upper"), None),
    ],
)
def test_the_token_that_ends_a_turn(template: str, end: int | None) -> None:
    found = ChatTemplate.of(tokenizer(template))
    assert found is not None
    assert found.end_of_turn() == end
