"""The text in front of an answer: plain, or in a chat template as lm_eval makes it."""

from pathlib import Path

import pytest

from megalite.data.chat.chat_template import load_chat_template
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.evaluate.few_shot import FewShot
from megalite.evaluate.questions import ChoiceQuestion, OpenQuestion
from megalite.generation.prompts import Chat
from megalite.generation.stops import NO_STOPS
from tests.support.tiny import tiny_tokenizer

POOL = [ChoiceQuestion(f"Question: {number}?\nAnswer:", ("yes", "no"), 1) for number in range(2)]
ASKED = OpenQuestion("Question: Who?\nAnswer:", "Tom", "Tom")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return load_tokenizer(folder)


def chat(tokenizer: Tokenizer, name: str = "chatml") -> Chat:
    folder = Path(tokenizer.file).parent
    template = load_chat_template(folder, name, tokenizer.end_of_document)
    return Chat(tokenizer, folder, template)


def test_without_a_template_examples_and_question_are_one_text(tokenizer: Tokenizer) -> None:
    plain = FewShot(POOL[:1], 1)
    assert plain.prompt(ASKED, 0) == "Question: 0?\nAnswer: no\n\nQuestion: Who?\nAnswer:"
    assert (plain.delimiter, plain.stops, plain.encoder(tokenizer).adds_start) == (" ", NO_STOPS, None)


def test_a_template_holds_all_in_one_message_or_each_example_as_turns(tokenizer: Tokenizer) -> None:
    rules = chat(tokenizer)
    one = FewShot(POOL[:1], 1, chat=rules)
    text = "Question: 0?\nAnswer: no\n\nQuestion: Who?\nAnswer:"
    assert one.prompt(ASKED, 0) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    turns = FewShot(POOL[:1], 1, chat=rules, turns=True)
    assert turns.prompt(ASKED, 0) == (
        "<|im_start|>user\nQuestion: 0?\nAnswer:<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>user\nQuestion: Who?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    )
    assert one.delimiter == "" and one.stops == rules.stops


def test_a_prompt_in_a_template_has_the_ids_of_a_conversation(tokenizer: Tokenizer) -> None:
    """The template writes the start token where training had it; none is added in front."""
    for name in ("chatml", "plain"):
        rules = chat(tokenizer, name)
        asked = FewShot(chat=rules)
        expected = rules.prompt_ids([{"role": "user", "content": ASKED.context}])
        assert asked.encoder(tokenizer).ids(asked.prompt(ASKED, 0)) == expected
