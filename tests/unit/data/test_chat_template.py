"""Chat templates: where they come from, and which characters of a conversation are trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megalite.data.chat_template import BUILT_IN, ChatTemplate, load_chat_template
from megalite.data.conversation import Conversation
from megalite.data.conversation_encoding import ChatEncoding, encode_conversation
from megalite.data.tokenizer import Tokenizer
from megalite.data.trained_tokens import ids_of, is_trained
from megalite.errors import DataError

MESSAGES = (
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "the tensor waits for\nwhat?"},
    {"role": "assistant", "content": "the weights"},
    {"role": "user", "content": "and das Maß?"},
    {"role": "assistant", "content": "nothing at all, 每个阶段."},
)
TALK = Conversation(MESSAGES, "talks.jsonl, line 7")
SPECIAL = (("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>"))
# Writes a turn as chatml does, and does not mark the answers.
UNMARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def built_in(name: str) -> ChatTemplate:
    return ChatTemplate(name, BUILT_IN[name], SPECIAL)


def trained_text(template: ChatTemplate, train_on: Any, talk: Conversation = TALK) -> list[str]:
    text = template.render(talk)
    return [text[start:end] for start, end in template.trained_spans(talk, text, train_on)]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("train_on", ["answers", "last", "all"])
def test_ids_and_trained_tokens_are_those_of_transformers(
    tokenizer: Tokenizer, name: str, train_on: Any
) -> None:
    encoding = ChatEncoding(built_in(name), train_on, 1000, "stop")
    tokens, too_long = encode_conversation(TALK, encoding, tokenizer)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **dict(SPECIAL)).apply_chat_template(
        list(MESSAGES), chat_template=BUILT_IN[name], return_assistant_tokens_mask=True, return_dict=True
    )
    assert ids_of(tokens).tolist() == theirs["input_ids"] and not too_long
    expected = theirs["assistant_masks"]
    assert 0 < sum(expected) < len(expected)
    if train_on == "last":
        last_prompt = len(expected) - expected[::-1].index(0)
        expected = [int(place >= last_prompt) for place in range(len(expected))]
        if name == "chatml":
            assert expected[-1] == 1
    elif train_on == "all":
        expected = [1] * len(expected)
    assert is_trained(tokens).astype(int).tolist() == expected


def test_each_answer_is_trained_with_the_end_of_its_turn() -> None:
    answers = ["the weights", "nothing at all, 每个阶段."]
    assert trained_text(built_in("chatml"), "answers") == [f"{each}<|im_end|>\n" for each in answers]
    for name in ("alpaca", "plain"):
        assert trained_text(built_in(name), "answers") == [f"{each}<|endoftext|>" for each in answers]


@pytest.mark.parametrize("template", [BUILT_IN["chatml"], UNMARKED])
def test_answers_of_the_prompt_are_not_trained(template: str) -> None:
    talk = Conversation(MESSAGES, "", prompt=4)
    chatml = ChatTemplate("", template, SPECIAL)
    assert trained_text(chatml, "answers", talk) == ["nothing at all, 每个阶段.<|im_end|>\n"]


@pytest.mark.parametrize("train_on", ["answers", "last", "all"])
def test_a_template_without_marks_is_understood_by_what_each_answer_adds(train_on: Any) -> None:
    unmarked = ChatTemplate("unmarked", UNMARKED, ())
    assert unmarked.render(TALK) == built_in("chatml").render(TALK)
    assert trained_text(unmarked, train_on) == trained_text(built_in("chatml"), train_on)


def test_a_template_that_rewrites_earlier_answers_is_refused_but_for_the_last() -> None:
    thinking = "{% for message in messages %}{{ message.content if loop.last else message.content[:3] }}|{% endfor %}"
    template = ChatTemplate("of a tokenizer", thinking, ())
    with pytest.raises(
        DataError, match=r"talks.jsonl, line 7: .* messages\[2\] otherwise .*data.train_on = \"last\""
    ):
        trained_text(template, "answers")
    assert trained_text(ChatTemplate("", UNMARKED, ()), "last") == ["nothing at all, 每个阶段.<|im_end|>\n"]


def test_a_template_that_fails_names_the_conversation() -> None:
    alternating = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(
        DataError, match=r"talks.jsonl, line 7: .*\(Conversation roles must alternate\).*chatml"
    ):
        ChatTemplate("x.jinja", alternating, ()).render(TALK)
    with pytest.raises(DataError, match=r"talks.jsonl, line 7: the chat template x.jinja fails"):
        ChatTemplate("x.jinja", "{% for %}", ()).render(TALK)


def test_an_exported_template_has_no_marks() -> None:
    template = built_in("chatml")
    assert "generation %}" not in template.for_export
    assert ChatTemplate("", template.for_export, SPECIAL).render(TALK) == template.render(TALK)


def tokenizer_folder(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_tokenizers_own_template_is_found_wherever_transformers_saves_it(tmp_path: Path) -> None:
    eos = {"content": "</s>", "special": True}
    folder = tokenizer_folder(tmp_path, chat_template="in the config", eos_token=eos, bos_token=None)
    found = load_chat_template(folder, None, "<end>")
    assert (found.text, dict(found.special_tokens)) == (
        "in the config",
        {"bos_token": "", "eos_token": "</s>"},
    )
    named = [{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer_folder(tmp_path, chat_template=named)
    assert load_chat_template(folder, None).text == "usual"
    assert load_chat_template(folder, "tool_use").text == "with tools"
    (folder / "chat_template.jinja").write_text("of the file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("for rag")
    assert load_chat_template(folder, None).text == "of the file"
    assert load_chat_template(folder, "rag").text == "for rag"


def test_a_template_is_built_in_or_a_file(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    assert dict(load_chat_template(folder, "plain", "<end>").special_tokens)["eos_token"] == "<end>"
    assert load_chat_template(folder, "chatml").text == BUILT_IN["chatml"]
    (tmp_path / "mine.jinja").write_text("mine")
    assert load_chat_template(folder, str(tmp_path / "mine.jinja")).text == "mine"
    with pytest.raises(
        DataError, match=r"has no chat template; set tokenizer.chat_template to one of chatml"
    ):
        load_chat_template(folder, None)
    with pytest.raises(
        DataError,
        match=r"the chat template 'chatmk' is neither a file nor .* set tokenizer.chat_template to one",
    ):
        load_chat_template(folder, "chatmk")


def test_a_conversation_that_is_too_long_is_cut_left_out_or_refused(tokenizer: Tokenizer) -> None:
    template = built_in("plain")
    whole, _ = encode_conversation(TALK, ChatEncoding(template, "answers", 1000, "stop"), tokenizer)
    fitting = len(whole) - 1
    kept, too_long = encode_conversation(TALK, ChatEncoding(template, "answers", fitting, "stop"), tokenizer)
    assert (kept == whole).all() and not too_long
    cut, too_long = encode_conversation(
        TALK, ChatEncoding(template, "answers", fitting - 1, "truncate"), tokenizer
    )
    assert (cut == whole[:-1]).all() and too_long
    dropped, too_long = encode_conversation(
        TALK, ChatEncoding(template, "answers", fitting - 1, "drop"), tokenizer
    )
    assert not len(dropped) and too_long
    with pytest.raises(
        DataError, match=f"talks.jsonl, line 7: {len(whole)} tokens, more than the {len(whole) - 1}"
    ):
        encode_conversation(TALK, ChatEncoding(template, "answers", fitting - 1, "stop"), tokenizer)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(tokenizer: Tokenizer) -> None:
    encoding = ChatEncoding(built_in("plain"), "answers", 1000, "truncate")
    whole, _ = encode_conversation(TALK, encoding, tokenizer)
    prompt = int(is_trained(whole).argmax())
    room = ChatEncoding(encoding.template, "answers", prompt, "truncate")
    assert is_trained(encode_conversation(TALK, room, tokenizer)[0]).sum() == 1
    none = ChatEncoding(encoding.template, "answers", prompt - 1, "truncate")
    with pytest.raises(
        DataError, match=f"the prompt has {prompt} tokens .* raise it to {len(whole) - 1}, or"
    ):
        encode_conversation(TALK, none, tokenizer)
    silent = ChatTemplate(
        "x", "{% for message in messages %}{% generation %}{% endgeneration %}m{% endfor %}", ()
    )
    with pytest.raises(DataError, match="writes no answer that could be trained"):
        encode_conversation(TALK, ChatEncoding(silent, "answers", 9, "truncate"), tokenizer)
