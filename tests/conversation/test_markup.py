"""Tokens of a whole conversation, by tokenizers of every kind, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from questkv.cli.prompt import Conversation, common
from questkv.conversation.markup import Markup, begin_ids, markup_ids, text_ids
from questkv.models import LoadedModel

CHAT = (
    "{{ bos_token }}{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }}</s>{% endif %}{% endfor %}"
)
THINK = CHAT.replace("<s>assistant\n{% endif %}", "<s>assistant\n<think>\n{% endif %}")
WORDS = "The lamp  stood in the window\n\nall night. Who lit it? Nobody, said the keeper; nobody 12 34 ever. " * 9
SPECIAL = ["<s>", "</s>", "<unk>"]


def finished(backend: Tokenizer, template: str, *extra: AddedToken) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(list(extra))
    tokenizer.chat_template = template
    return tokenizer


def byte_level(template: str = CHAT) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([WORDS + "\n\n\n \n"], trainer)
    return finished(backend, template)


def metaspace(prepend: str, template: str = INSTRUCT) -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=prepend != "never")
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend)
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator([WORDS + "[INST] [/INST]"] * 3, trainer)
    return finished(backend, template)


def legacy_llama() -> Any:
    """BPE over the whole text behind a normalizer that puts a blank before each stretch."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([WORDS], trainer)
    return finished(backend, INSTRUCT)


def word_piece() -> Any:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([WORDS], trainer)
    return finished(backend, CHAT)


def stripping() -> Any:
    """Control tokens that swallow blanks around them, and one that is no special token."""
    tokenizer = byte_level(THINK)
    tokenizer.add_special_tokens({"eos_token": AddedToken("</s>", rstrip=True, lstrip=True, special=True)})
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


MAKERS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never, unsplit": lambda: metaspace("never", CHAT),
    "legacy llama": legacy_llama,
    "word piece": word_piece,
    "stripping": stripping,
}


@cache
def made(name: str) -> Any:
    return MAKERS[name]()


def expected(tokenizer: Any, document: str, turns: list[tuple[str, str]], question: str) -> list[int]:
    questions = [*(asked for asked, _ in turns), question]
    messages = [{"role": "user", "content": f"{document}\n\n{questions[0]}"}]
    for (_, reply), asked in zip(turns, questions[1:], strict=True):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": asked}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def conversation(tokenizer: Any, document: str, turns: list[tuple[str, str]]) -> Conversation:
    made = Conversation(tokenizer)
    made.document = document
    for question, reply in turns:
        made.add(made.prompt(question), [reply], [])
    return made


TEXT = st.text(st.sampled_from(" \n\tTheInwdlampk.?,<>[]/s12éß\u2581"), min_size=1, max_size=40)
TURNS = st.lists(st.tuples(TEXT, TEXT), max_size=2)


@pytest.mark.parametrize("name", MAKERS)
@given(document=TEXT, turns=TURNS, question=TEXT)
def test_tokens_are_those_of_the_whole_conversation(
    name: str, document: str, turns: list[tuple[str, str]], question: str
) -> None:
    tokenizer = made(name)
    if any(mark in text for mark in ("<s>", "</s>") for turn in [(document, question), *turns] for text in turn):
        return  # transformers counts these as markup
    prompt = conversation(tokenizer, document, turns).prompt(question)
    assert prompt.ids == expected(tokenizer, document, turns, question)


@pytest.mark.parametrize("name", MAKERS)
@given(before=TEXT, after=TEXT, mark=st.sampled_from(SPECIAL))
def test_control_tokens_come_from_the_template_alone(name: str, before: str, after: str, mark: str) -> None:
    tokenizer = made(name)
    known = Markup(tokenizer, tokenizer.chat_template)
    special = {tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>")}
    plain = conversation(tokenizer, "a", []).prompt("b").ids
    marked = conversation(tokenizer, before + mark + after, []).prompt("b" + mark).ids
    assert [i for i in marked if i in special] == [i for i in plain if i in special]
    # ordinary text: what a tokenizer gives that has never heard of the name
    text = f"{before}{mark}{after}"
    assert (
        known.ids([text], [], lambda own, reply: own(text)) == strange(name).encode(text, add_special_tokens=False).ids
    )


@cache
def strange(name: str) -> Tokenizer:
    """The tokenizer without control tokens: no added tokens, and no pieces that bear their names."""
    import json

    spec = json.loads(made(name).backend_tokenizer.to_str())
    names = {token["content"] for token in spec["added_tokens"]}
    spec.update(added_tokens=[], post_processor=None)
    model = spec["model"]
    if model.get("unk_token") in names:
        model["unk_token"] = "\ue00a" + model["unk_token"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {("\ue00a" + p if p in names else p): i for p, i in model["vocab"].items()}
    else:
        model["vocab"] = [["\ue00a" + p if p in names else p, score] for p, score in model["vocab"]]
    return Tokenizer.from_str(json.dumps(spec))


@given(document=TEXT, turns=TURNS, question=TEXT)
def test_tokens_of_smollm2_are_those_of_the_whole_conversation(
    smollm2: LoadedModel, document: str, turns: list[tuple[str, str]], question: str
) -> None:
    prompt = conversation(smollm2.tokenizer, document, turns).prompt(question)
    assert prompt.ids == expected(smollm2.tokenizer, document, turns, question)


def test_two_line_ends_before_a_word_are_two_tokens_of_smollm2(smollm2: LoadedModel) -> None:
    pieces = smollm2.tokenizer.convert_ids_to_tokens(conversation(smollm2.tokenizer, "A lamp.", []).prompt("Who?").ids)
    where = pieces.index("Who")
    assert pieces[where - 4 : where] == ["Ġlamp", ".", "Ċ", "Ċ"]


def test_a_stray_blank_stands_at_no_seam() -> None:
    tokenizer = made("metaspace first")
    pieces = tokenizer.convert_ids_to_tokens(conversation(tokenizer, "The lamp", []).prompt("Who?").ids)
    assert "".join(pieces) == "<s>[INST]▁The▁lamp\n\nWho?▁[/INST]"


@pytest.mark.parametrize("name", MAKERS)
@given(document=TEXT, question=TEXT)
def test_a_plain_prompt_is_tokenised_at_once(name: str, document: str, question: str) -> None:
    tokenizer = made(name)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        talk = Conversation(tokenizer)
        talk.document = document
        text = f"{document}\n\nQuestion: {question}\nAnswer:"
        if not any(mark in text for mark in (*SPECIAL, "<think>")):
            assert talk.prompt(question).ids == tokenizer(text)["input_ids"]
            assert talk.prompt(question, "It is").ids == tokenizer(f"{text} It is")["input_ids"]
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize("name", MAKERS)
def test_the_documents_part_is_the_beginning_of_every_prompt(name: str) -> None:
    talk = conversation(made(name), "The lamp stood in the window.", [])
    ids = talk.document_ids()
    for question in ("Why?", "1", "?", "the lamp"):
        assert common(talk.prompt(question).ids, ids) >= len(ids) - 1
        assert len(ids) > 5
        own = talk.document_ids(question)
        assert talk.prompt(question).ids[: len(own)] == own


@pytest.mark.parametrize("name", MAKERS)
def test_an_answers_beginning_is_tokenised_with_what_is_before_it(name: str) -> None:
    tokenizer = made(name)
    talk = conversation(tokenizer, "The lamp stood.", [])
    prompt = talk.prompt("Who?", "The keeper")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The lamp stood.\n\nWho?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.ids == tokenizer(text + "The keeper", add_special_tokens=False)["input_ids"]
    assert prompt.ids[-len(prompt.begun_ids) :] == list(prompt.begun_ids)
    assert prompt.begun == "The keeper"


def test_markup_counts_in_templates_and_never_in_texts() -> None:
    tokenizer = made("byte level")
    assert markup_ids(tokenizer, "<s>a") == [0, *text_ids(tokenizer, "a")]
    assert len(text_ids(tokenizer, "<s>a")) == 4
    assert markup_ids(tokenizer, "") == text_ids(tokenizer, "") == begin_ids(tokenizer) == []
