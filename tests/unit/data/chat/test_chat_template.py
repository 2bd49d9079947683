"""Chat templates: where they come from, and which characters of a conversation are trained."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as DecodeBytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelOffsets
from transformers import PreTrainedTokenizerFast

from megalite.data.chat.chat_template import BUILT_IN, ChatTemplate, TrainedText, load_chat_template
from megalite.data.chat.conversation import Conversation
from megalite.data.chat.conversation_encoding import ChatEncoding, encode_conversation
from megalite.data.files.trained_tokens import ids_of, is_trained
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import DataError
from tests.support.museum import exhibit
from tests.support.planted import Planted, instead

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
    texts = template.trained_texts(talk, train_on)
    return [each.text[start:end] for each in texts for start, end in each.spans]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("train_on", ["answers", "last", "all"])
def test_ids_and_trained_tokens_are_those_of_transformers(
    tokenizer: Tokenizer, name: str, train_on: Any
) -> None:
    encoding = ChatEncoding(built_in(name), train_on, 1000, "stop")
    [(tokens, too_long)] = encode_conversation(TALK, encoding, tokenizer)
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


def all_is_an_answer(
    template: ChatTemplate, talk: Conversation, text: str, places: object
) -> list[TrainedText]:
    return [TrainedText(text, ((0, len(text)),))]


@exhibit(
    "Megatron-Bridge#3359",
    also=("Megatron-Bridge#2598", "Megatron-Bridge PR#3927"),
    subject="conversations",
    there="a chat template without `{% generation %}` gave a mask of ones, so that prompts were trained too",
    here="without marks each answer is found by its prompt, and the same tokens are trained",
    fault=Planted("megalite.data.chat.chat_template:ChatTemplate._added", instead(all_is_an_answer)),
)
@pytest.mark.parametrize("train_on", ["answers", "last", "all"])
def test_a_template_without_marks_is_understood_by_what_each_answer_adds(train_on: Any) -> None:
    unmarked = ChatTemplate("unmarked", UNMARKED, ())
    assert unmarked.render(TALK) == built_in("chatml").render(TALK)
    assert trained_text(unmarked, train_on) == trained_text(built_in("chatml"), train_on)


def test_an_answer_that_its_prompt_does_not_begin_is_refused_and_both_remedies_work() -> None:
    cutting = "{% for message in messages %}{{ message.content if loop.last else message.content[:3] }}|{% endfor %}"
    for train_on in ("answers", "last"):
        with pytest.raises(
            DataError,
            match=r"talks.jsonl, line 7: .* messages\[.\] otherwise .*{% gen.*data.train_on = \"all\"",
        ):
            trained_text(ChatTemplate("of a tokenizer", cutting, ()), train_on)
    assert trained_text(ChatTemplate("", cutting, ()), "all") == [
        "Ans|the|the|and|nothing at all, 每个阶段.|"
    ]
    write = "message.content if loop.last else message.content[:3]"
    marking = (
        f"{{% for message in messages %}}{{% if message.role == 'assistant' %}}{{% generation %}}{{{{ {write} }}}}"
        f"|{{% endgeneration %}}{{% else %}}{{{{ {write} }}}}|{{% endif %}}{{% endfor %}}"
    )
    assert trained_text(ChatTemplate("", marking, ()), "answers") == ["the|", "nothing at all, 每个阶段.|"]
    assert trained_text(ChatTemplate("", UNMARKED, ()), "last") == ["nothing at all, 每个阶段.<|im_end|>\n"]


# As Qwen3's: an empty think block in the last answer; as DeepSeek-R1's: thinking is opened by the prompt, and dropped.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set answer = m.content.split('</think>') %}"
    "{% if loop.last %}<think>\n"
    "{{ (answer[0] | replace('<think>', '')).strip('\n') if answer | length > 1 }}\n</think>\n\n"
    "{% endif %}{{ answer[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>"
    "{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
SUM, TWO, TWICE, FOUR = (
    {"role": role, "content": content}
    for role, content in (("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"))
)
THOUGHT = {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"}


def without_its_thinking(answer: Callable[..., Any]) -> Callable[..., Any]:
    def with_an_empty_one(self: ChatTemplate, talk: Conversation, place: int, written: str) -> Any:
        message = talk.messages[place]
        short = message | {"content": message["content"].rpartition("</think>")[2]}
        messages = (*talk.messages[:place], short, *talk.messages[place + 1 :])
        return answer(self, replace(talk, messages=messages), place, written)

    return with_an_empty_one


def as_one_text(
    template: ChatTemplate, talk: Conversation, whole: str, places: list[int]
) -> list[TrainedText]:
    lengths = [
        (len(template.render(talk, at, prompt=True)), len(template.render(talk, at + 1))) for at in places
    ]
    return [TrainedText(whole, tuple(lengths))]


@exhibit(
    "OpenRLHF#1080",
    also=("OpenRLHF PR#1227",),
    subject="conversations",
    there="a template that drops the thinking of earlier answers shifted the mask onto other messages",
    here="such a conversation is several texts: each answer behind the prompt from which it would be generated",
    fault=Planted("megalite.data.chat.chat_template:ChatTemplate._added", instead(as_one_text)),
)
@exhibit(
    "trl PR#6363",
    also=("trl#6361",),
    subject="conversations",
    there="an answer with a closing `</think>` alone, opened by the prompt, got an empty thinking before it",
    here="the thinking that the prompt opens goes on in the answer",
    fault=Planted("megalite.data.chat.chat_template:ChatTemplate._answer", without_its_thinking),
    case="template4-first4",
)
@pytest.mark.parametrize("train_on", ["answers", "last"])
@pytest.mark.parametrize(
    ("template", "first", "expected"),
    [
        (QWEN3, TWO, ["<think>\n\n</think>\n\n2<|im_end|>\n", "<think>\n\n</think>\n\n4<|im_end|>\n"]),
        (
            QWEN3,
            THOUGHT,
            ["<think>\none and one\n</think>\n\n2<|im_end|>\n", "<think>\n\n</think>\n\n4<|im_end|>\n"],
        ),
        (R1, TWO, ["</think>\n\n2<|end|>", "</think>\n\n4<|end|>"]),
        (R1, THOUGHT, ["one and one\n</think>\n\n2<|end|>", "</think>\n\n4<|end|>"]),
        (
            R1,
            TWO | {"content": "one and one</think>2"},
            ["one and one</think>2<|end|>", "</think>\n\n4<|end|>"],
        ),
        (R1, TWO | {"content": "<b>2</b>"}, ["</think>\n\n<b>2</b><|end|>", "</think>\n\n4<|end|>"]),
    ],
)
def test_each_answer_is_trained_behind_the_prompt_of_its_generation(
    template: str, first: dict[str, str], expected: list[str], train_on: Any
) -> None:
    talk, chat = Conversation((SUM, first, TWICE, FOUR), ""), ChatTemplate("", template, ())
    texts = chat.trained_texts(talk, train_on)
    prompts = [chat.render(talk, place, prompt=True) for place in (1, 3)]
    pairs = list(zip(prompts, expected, strict=True))[-1 if train_on == "last" else 0 :]
    assert [each.text for each in texts] == [prompt + answer for prompt, answer in pairs]
    assert [each.spans for each in texts] == [
        ((len(prompt), len(prompt + answer)),) for prompt, answer in pairs
    ]


@pytest.mark.parametrize("content", ["xX", "one and one</think>xX", "one</think> "])
def test_an_answer_that_the_template_rewrites_is_not_told_by_its_last_characters(content: str) -> None:
    talk = Conversation((SUM, TWO | {"content": content}, TWICE, FOUR), "rows.jsonl, line 1")
    chat = ChatTemplate("loud", R1.replace("[-1] }}", "[-1] | upper }}"), ())
    with pytest.raises(
        DataError, match=r"^rows.jsonl, line 1: the chat template loud writes messages\[1\] otherwise"
    ):
        chat.trained_texts(talk, "answers")


def test_answers_within_a_turn_stay_in_one_text() -> None:
    talk = Conversation(MESSAGES, "")
    [text] = ChatTemplate("", UNMARKED, ()).trained_texts(talk, "answers")
    assert len(text.spans) == 2 and text.text == built_in("chatml").render(talk)


@pytest.mark.parametrize("name", [*BUILT_IN, "unmarked"])
def test_a_conversation_may_begin_with_an_answer(name: str) -> None:
    talk = Conversation(({"role": "assistant", "content": "Hello"}, *MESSAGES[1:3]), "")
    template = ChatTemplate("", UNMARKED, ()) if name == "unmarked" else built_in(name)
    end = "<|endoftext|>" if name in ("alpaca", "plain") else "<|im_end|>\n"
    assert trained_text(template, "answers", talk) == [f"Hello{end}", f"the weights{end}"]


@exhibit(
    "vllm PR#54812",
    subject="conversations",
    there="`{%- generation -%}`, with hyphens, was not taken for the mark of an answer",
    here="every spelling of the mark that Jinja takes marks the same tokens",
    fault=Planted("megalite.data.chat.chat_template:_GENERATION", instead(re.compile("{% generation %}"))),
)
@pytest.mark.parametrize("mark", ["{%- generation -%}", "{% generation %}", "{%-generation%}"])
def test_marks_of_every_spelling_and_several_in_a_message_are_those_of_its_message(mark: str) -> None:
    end = mark.replace("generation", " endgeneration ")
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{mark}{{{{ m.content[:3] }}}}{end}-{mark}{{{{ m.content[3:] }}}}{end}"
        "{% else %}{{ m.content }}{% endif %}|{% endfor %}"
    )
    template = ChatTemplate("", text, ())
    answers = [["the", " weights"], ["not", "hing at all, 每个阶段."]]
    assert trained_text(template, "answers") == answers[0] + answers[1]
    assert trained_text(template, "last") == answers[1]
    assert trained_text(template, "answers", Conversation(MESSAGES, "", marks={2: False})) == answers[1]
    assert trained_text(template, "answers", Conversation(MESSAGES, "", prompt=4)) == answers[1]


@exhibit(
    "cookbook PR#387",
    subject="conversations",
    there="`weight: 0` of an answer was left out while rows were read, so the answer was trained",
    here="an answer whose row says `weight: 0` or `train: false` is not trained",
    fault=Planted(
        "megalite.data.chat.chat_template:ChatTemplate._trained_answers",
        lambda answers: lambda self, talk, train_on: answers(self, replace(talk, marks={}), train_on),
    ),
)
@pytest.mark.parametrize("template", [BUILT_IN["chatml"], UNMARKED])
def test_messages_that_say_so_are_not_trained(template: str) -> None:
    chatml = ChatTemplate("chatml", template, SPECIAL)
    first, second = trained_text(chatml, "answers")
    for marks, expected in (
        ({2: False}, [second]),
        ({4: False, 2: True}, [first]),
        ({1: False}, [first, second]),
    ):
        assert trained_text(chatml, "answers", Conversation(MESSAGES, "", marks=marks)) == expected
    assert trained_text(chatml, "last", Conversation(MESSAGES, "", marks={4: False})) == []
    before, after = trained_text(chatml, "all", Conversation(MESSAGES, "", marks={1: False}))
    assert before + f"<|im_start|>user\n{MESSAGES[1]['content']}<|im_end|>\n" + after == chatml.render(TALK)
    talk = Conversation(MESSAGES, "a.jsonl, line 2", marks={1: True})
    with pytest.raises(DataError, match=r'a.jsonl, line 2: messages\[1\], of user, .*data.train_on = "all"'):
        trained_text(chatml, "answers", talk)
    assert trained_text(chatml, "all", talk) == [chatml.render(TALK)]


def test_a_conversation_whose_answers_all_say_so_is_refused(tokenizer: Tokenizer) -> None:
    talk = Conversation(MESSAGES, "a.jsonl, line 2", marks={2: False, 4: False})
    with pytest.raises(DataError, match=r"a.jsonl, line 2: every answer says not to train on it"):
        encode_conversation(talk, ChatEncoding(built_in("chatml"), "answers", 1000, "stop"), tokenizer)


def test_keys_that_the_template_does_not_read_are_named() -> None:
    talk = Conversation(({"role": "user", "content": "a", "name": "Eve", "foo": 1}, MESSAGES[2]), "")
    naming = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    assert ChatTemplate("", naming, ()).unused_keys(talk) == [["foo"], []]
    assert ChatTemplate("", "{{ messages | tojson }}", ()).unused_keys(talk) == [[], []]


@exhibit(
    "transformers#47325",
    subject="conversations",
    there="an answer that begins the text, or ends in white space that the tokenizer strips, lost its mask",
    here="each answer is trained whole, with white space at its end",
    fault=Planted(
        "megalite.data.chat.conversation_encoding:_in_spans",
        instead(
            lambda offsets, spans: np.array([any(a < y and b > x for x, y in spans) for a, b in offsets])
        ),
    ),
)
@pytest.mark.parametrize("trimmed", [True, False])
def test_white_space_at_the_end_of_an_answer_is_trained(trimmed: bool) -> None:
    alphabet = {token: place for place, token in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Backend(BPE(alphabet, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), DecodeBytes()
    backend.post_processor = ByteLevelOffsets(trim_offsets=trimmed)
    tokenizer = Tokenizer(Path(), backend, len(alphabet), "!", alphabet["!"], "")
    talk = Conversation((SUM, {"role": "assistant", "content": "two \n"}, TWICE, FOUR), "")
    for text in (BUILT_IN["chatml"], UNMARKED):
        [(tokens, _)] = encode_conversation(
            talk, ChatEncoding(ChatTemplate("", text, ()), "answers", 1000, "stop"), tokenizer
        )
        assert tokenizer.decode(tokens[tokens >= 0].tolist()) == "two \n<|im_end|>\n4<|im_end|>\n"
    # Marks of the text alone, whose last token has no character.
    talk = Conversation((SUM, {"role": "assistant", "content": "two "}, TWICE, FOUR), "")
    alone = BUILT_IN["chatml"].replace(
        "{{ message.content + '<|im_end|>\\n' }}{% endgen", "{{ message.content }}{% endgen"
    )
    [(tokens, _)] = encode_conversation(
        talk, ChatEncoding(ChatTemplate("", alone, ()), "answers", 1000, "stop"), tokenizer
    )
    assert tokenizer.decode(tokens[tokens >= 0].tolist()) == "two 4"


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


@exhibit(
    "torchtitan PR#4268",
    subject="conversations",
    there="a sample of one token more than a row has positions, which fits once labels are shifted, was dropped",
    here="it is kept whole, whatever `data.too_long` says",
    fault=Planted(
        "megalite.data.chat.conversation_encoding:_encoded",
        lambda encoded: (
            lambda text, talk, encoding, tokenizer: encoded(
                text, talk, replace(encoding, sequence_length=encoding.sequence_length - 1), tokenizer
            )
        ),
        seen_as=(DataError,),
    ),
)
def test_a_conversation_that_is_too_long_is_cut_left_out_or_refused(tokenizer: Tokenizer) -> None:
    template = built_in("plain")
    [(whole, _)] = encode_conversation(TALK, ChatEncoding(template, "answers", 1000, "stop"), tokenizer)
    fitting = len(whole) - 1
    [(kept, too_long)] = encode_conversation(
        TALK, ChatEncoding(template, "answers", fitting, "stop"), tokenizer
    )
    assert (kept == whole).all() and not too_long
    [(cut, too_long)] = encode_conversation(
        TALK, ChatEncoding(template, "answers", fitting - 1, "truncate"), tokenizer
    )
    assert (cut == whole[:-1]).all() and too_long
    [(dropped, too_long)] = encode_conversation(
        TALK, ChatEncoding(template, "answers", fitting - 1, "drop"), tokenizer
    )
    assert not len(dropped) and too_long
    with pytest.raises(
        DataError, match=f"talks.jsonl, line 7: {len(whole)} tokens, more than the {len(whole) - 1}"
    ):
        encode_conversation(TALK, ChatEncoding(template, "answers", fitting - 1, "stop"), tokenizer)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(tokenizer: Tokenizer) -> None:
    encoding = ChatEncoding(built_in("plain"), "answers", 1000, "truncate")
    [(whole, _)] = encode_conversation(TALK, encoding, tokenizer)
    prompt = int(is_trained(whole).argmax())
    room = ChatEncoding(encoding.template, "answers", prompt, "truncate")
    assert is_trained(encode_conversation(TALK, room, tokenizer)[0][0]).sum() == 1
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
