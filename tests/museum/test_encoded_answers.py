"""Exhibits of what is trained of an answer: its end, merges over its border, and its place in the whole text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.batches.conversation_rows import ConversationRows
from megalite.data.batches.packing import IGNORE_INDEX
from megalite.data.chat import conversation_encoding
from megalite.data.chat.chat_template import ChatTemplate
from megalite.data.chat.conversation import Conversation
from megalite.data.chat.conversation_corpus import ConversationCorpus
from megalite.data.chat.conversation_encoding import ChatEncoding, encode_conversation
from megalite.data.chat.preference import preference_pair
from megalite.data.files.token_file import TokenFile
from megalite.data.files.trained_tokens import ids_of, is_trained, marked
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.support.museum import exhibit
from tests.support.planted import Planted
from tests.support.tiny import END_OF_DOCUMENT, tiny_tokenizer

BARE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
# As Mistral's: white space before an answer, which its prompt does not have.
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = (("bos_token", END_OF_DOCUMENT), ("eos_token", END_OF_DOCUMENT))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def encoding(template: str) -> ChatEncoding:
    return ChatEncoding(ChatTemplate("a.jinja", template, SPECIAL), "answers", 200, "stop")


def trained(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids_of(tokens)[is_trained(tokens)].tolist())


def ignore_padding(read: Callable[..., Any]) -> Callable[..., Any]:
    def without_the_id(rows: Any, length: int, pad_id: int) -> Any:
        found = read(rows, length, pad_id)
        found.labels[found.labels == pad_id] = IGNORE_INDEX
        return found

    return without_the_id


@exhibit(
    "trl PR#6357",
    subject="conversations",
    there="labels were masked by the id of padding, so an end of text with the same id was never trained",
    here="padding is known by its place: each answer's end is a label, whatever the id of padding",
    fault=Planted("megalite.data.batches.conversation_rows:rows_of_tokens", ignore_padding),
)
def test_the_end_of_an_answer_is_a_label_though_padding_has_its_id(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [{"prompt": "the tensor?", "completion": answer} for answer in ("waits", "sends the weights")]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    corpus = ConversationCorpus.open([str(tmp_path / "rows.jsonl")])
    prepare_outputs(
        Preparation(corpus, tokenizer, (tmp_path / "x",), sequence_length=200, chat=encoding(BARE))
    )
    end = tokenizer.end_of_document_id
    read = ConversationRows(TokenFile.open(tmp_path / "x"), 40, "none", 0).read(np.arange(2), pad_id=end)
    assert (read.labels == end).sum(axis=1).tolist() == [1, 1]
    assert (read.labels[:, -1] == IGNORE_INDEX).all() and (read.input_ids[:, -1] == end).all()


def behind_the_common_tokens(encode: Callable[..., Any]) -> Callable[..., Any]:
    def encoded(pair: Any, *options: Any) -> Any:
        documents, too_long = encode(pair, *options)
        ids = [ids_of(each) for each in documents]
        shortest = min(map(len, ids))
        common = int((ids[0][:shortest] != ids[1][:shortest]).argmax())
        return [marked(each, np.arange(len(each)) >= common) for each in ids], too_long

    return encoded


@exhibit(
    "trl PR#6433",
    also=("trl PR#4639",),
    subject="preferences",
    there="the prompt was what the tokens of both answers begin with, so an answer lost what both begin with",
    here="the prompt is what the row says: each answer is trained whole, also where a merge crosses the border",
    fault=Planted("megalite.data.chat.conversation_encoding:encode_pair", behind_the_common_tokens),
)
@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [("the tensor", " waits for a micro batch", " waits for the weights"), ("the ten", "sor", "sors")],
)
def test_each_answer_of_a_pair_is_trained_whole(
    tokenizer: Tokenizer, prompt: str, chosen: str, rejected: str
) -> None:
    pair = preference_pair({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "a.jsonl, line 1")
    documents, _ = conversation_encoding.encode_pair(pair, encoding(BARE), tokenizer)
    for tokens, answer in zip(documents, (chosen, rejected), strict=True):
        # A token with characters of both is trained.
        assert trained(tokens, tokenizer).endswith(f"{answer}{END_OF_DOCUMENT}")
        assert tokenizer.decode(ids_of(tokens).tolist()) == f"{prompt}{answer}{END_OF_DOCUMENT}"
        assert ids_of(tokens).tolist() == tokenizer.encode(f"{prompt}{answer}{END_OF_DOCUMENT}")


def one_token_later(in_spans: Callable[..., Any]) -> Callable[..., Any]:
    return lambda offsets, spans: np.roll(in_spans(offsets, spans), 1)


@exhibit(
    "axolotl#2089",
    subject="conversations",
    there="an answer was found by counting tokens of its text alone, and a template's space shifted it by one",
    here="the span of an answer is that of its characters in the whole text, in every turn",
    fault=Planted("megalite.data.chat.conversation_encoding:_in_spans", one_token_later),
)
def test_a_space_of_the_template_shifts_no_answer(tokenizer: Tokenizer) -> None:
    turns = [("the tensor?", "waits for the weights"), ("a pipeline?", "sends nothing at all")]
    talk = Conversation(
        tuple(
            {"role": role, "content": content}
            for turn in turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ),
        "",
    )
    [(tokens, _)] = encode_conversation(talk, encoding(INST), tokenizer)
    expected: list[tuple[int, bool]] = [(tokenizer.end_of_document_id, False)]
    for question, answer in turns:
        expected += [(each, False) for each in tokenizer.encode(f"[INST] {question} [/INST]")]
        expected += [(each, True) for each in tokenizer.encode(f" {answer}{END_OF_DOCUMENT}")]
    assert list(zip(ids_of(tokens).tolist(), is_trained(tokens).tolist(), strict=True)) == expected
