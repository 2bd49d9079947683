"""Saving and loading, and that transformers reads the same ids out of what we write."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from megalite.data.files.partial_files import lock_held, partial
from megalite.data.text.corpus import DocumentPiece
from megalite.data.tokenizers.tokenizer import (
    Tokenizer,
    copy_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_file,
)
from megalite.data.tokenizers.tokenizer_training import train_bpe
from megalite.errors import DataError
from tests.support.tiny import tiny_corpus

HARD_TEXTS = [
    " starts with a space",
    "def f(x):\n\treturn x  # 7 \r\n\n\n    ",
    "das Maß 每个阶段 🙂 \x00\x7f",
    "<|endoftext|>",
    "two<|endoftext|> <|endoftext|>documents",
    "",
]


def pieces(texts: list[str]) -> list[DocumentPiece]:
    return [DocumentPiece(text, ends_document=True) for text in texts]


def trained(folder: Path, vocab_size: int = 300, **options: str) -> Tokenizer:
    end_of_document = options.get("end_of_document", "<|endoftext|>")
    save_tokenizer(train_bpe(pieces(tiny_corpus()), vocab_size, **options), folder, end_of_document)
    return load_tokenizer(folder, end_of_document=end_of_document)


def test_the_vocabulary_is_exact_and_the_end_of_a_document_is_in_it(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path, 311, end_of_document="</s>")
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (311, 0)
    assert tokenizer.encode("</s>") == [0]
    assert trained(tmp_path / "bytes", 257).vocab_size == 257


@given(st.text(max_size=200))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("model_type", [None, "llama"])
def test_transformers_gives_the_same_ids(tmp_path: Path, model_type: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = trained(tmp_path)
    if model_type:  # beside a model's config.json, AutoTokenizer may choose that model's own class
        transformers.LlamaConfig(vocab_size=300).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*HARD_TEXTS, *tiny_corpus()]:
        assert theirs(text)["input_ids"] == tokenizer.encode(text), text
        assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_of_document_id
    assert len(theirs) == tokenizer.vocab_size


def test_what_transformers_saves_is_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = trained(tmp_path / "ours")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = load_tokenizer(tmp_path / "theirs")
    assert [again.encode(text) for text in HARD_TEXTS] == [tokenizer.encode(text) for text in HARD_TEXTS]


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_a_copy_gives_our_ids_whatever_class_it_was_saved_as(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = trained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": name, "chat_template": "{{ messages }}", "pad_token": "<|endoftext|>"}
    (tmp_path / "ours" / "tokenizer_config.json").write_text(json.dumps(config))
    copy_tokenizer(tmp_path / "ours", tmp_path / "copy")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert [theirs(text)["input_ids"] for text in HARD_TEXTS] == [
        tokenizer.encode(text) for text in HARD_TEXTS
    ]
    assert (theirs.pad_token, theirs.chat_template) == ("<|endoftext|>", "{{ messages }}")


def test_a_copy_of_a_real_llama_tokenizer_keeps_its_first_token(tmp_path: Path, shared_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    copy_tokenizer(shared_data / "stories260K", tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, end_of_document="</s>")
    for text in HARD_TEXTS:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
        assert theirs(text)["input_ids"] == [1, *ours.encode(text)]


def test_added_tokens_are_the_same_in_every_form(tmp_path: Path) -> None:
    """Added tokens of every kind in transformers: special or not, stripping spaces, single words, not normalised."""
    transformers = pytest.importorskip("transformers")
    trained(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    theirs.add_tokens(["<tool>", AddedToken("word", single_word=True), AddedToken(" <l>", lstrip=True)])
    special = [AddedToken("<s>", rstrip=True, normalized=False, special=True), "<pad>"]
    theirs.add_special_tokens({"additional_special_tokens": special, "pad_token": "<mask>"})
    theirs.save_pretrained(tmp_path / "theirs")
    copy_tokenizer(tmp_path / "theirs", tmp_path / "copy")
    ours = load_tokenizer(tmp_path / "copy")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    texts = [
        *HARD_TEXTS,
        "a<tool>b <tool> word words sword",
        "x   <l> y<s>  z<pad><mask>",
        " <s>",
        "\n<pad>\x01<l>",
    ]
    expected = [theirs(text)["input_ids"] for text in texts]
    assert [again(text)["input_ids"] for text in texts] == expected
    assert [ours.encode(text) for text in texts] == expected
    assert ours.vocab_size == len(theirs) == len(again) == 306


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    trained(tmp_path)
    for content, said in (("{", "is not a tokenizer's configuration"), ("[]", "is not a JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(DataError, match=rf"tokenizer_config\.json {said}.*save it again"):
            copy_tokenizer(tmp_path, tmp_path / "copy")


def test_a_real_llama_tokenizer_is_loaded(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "stories260K", end_of_document="</s>")
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (512, 2)
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = train_bpe(pieces(tiny_corpus()), 300)
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    save_tokenizer(backend, tmp_path)
    ids = load_tokenizer(tmp_path).encode("a pipeline sends the weights")
    assert len(ids) > 4 and 0 not in ids


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "does not exist; name a Hugging Face folder, or train one"),
        ({"tokenizer.model": "x"}, r"no tokenizer\.json \(it has \['tokenizer.model'\]\); .*save_pretrained"),
        ({"tokenizer.json": "{"}, r"tokenizer\.json is not a tokenizer"),
        ({"tokenizer.json": json.dumps({"model": 3})}, r"tokenizer\.json is not a tokenizer"),
    ],
)
def test_bad_tokenizers_are_named(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    folder = tmp_path / "tok"
    for name, text in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(DataError, match=complaint):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, "</s>"),
        ({"tokenizer_config.json": '{"eos_token": {"content": "</s>", "lstrip": false}}'}, "</s>"),
        ({"tokenizer_config.json": "{}", "special_tokens_map.json": '{"eos_token": "</s>"}'}, "</s>"),
        ({"tokenizer_config.json": '{"eos_token": null}'}, "<|endoftext|>"),
        ({}, "<|endoftext|>"),
    ],
    ids=str,
)
def test_documents_end_in_the_tokenizers_own_token(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    backend = train_bpe(pieces(tiny_corpus()), 311)
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end_of_document == expected
    assert tokenizer.end_of_document_id == backend.token_to_id(expected)


def test_an_unknown_end_of_document_lists_the_special_tokens(tmp_path: Path) -> None:
    trained(tmp_path, end_of_document="</s>")
    with pytest.raises(
        DataError, match=r"no token '<\|endoftext\|>'; set tokenizer\.end_of_document.*\['</s>'\]"
    ):
        load_tokenizer(tmp_path, end_of_document="<|endoftext|>")
    assert (
        tokenizer_file(tmp_path) == tokenizer_file(tmp_path / "tokenizer.json") == tmp_path / "tokenizer.json"
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written .*choose another folder"):
        save_tokenizer(train_bpe(pieces(tiny_corpus()), 300), tmp_path / "file" / "folder")


def test_two_writers_at_once_do_not_tear_each_other(tmp_path: Path) -> None:
    backend = train_bpe(pieces(tiny_corpus()), 300)
    save_tokenizer(backend, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with lock_held(partial(tmp_path / "tokenizer.json")):  # another job is writing
        with pytest.raises(
            DataError, match=r"another process is preparing .*; wait for it, or choose another output"
        ):
            save_tokenizer(train_bpe(pieces(tiny_corpus()), 310), tmp_path, "<|endoftext|>")
        assert {
            path.name: path.read_bytes() for path in tmp_path.iterdir() if "partial" not in path.name
        } == before
    save_tokenizer(train_bpe(pieces(tiny_corpus()), 310), tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == 310
    assert {path.name for path in tmp_path.iterdir()} == set(before)
