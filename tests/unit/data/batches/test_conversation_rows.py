"""Rows of conversations: what fills them, and that no conversation is cut or sees another."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.cli import main
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.conversation_rows import ConcatenatedRows, ConversationRows, rows_of
from megalite.data.batches.documents import documents_of
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.chat.chat_template import load_chat_template
from megalite.data.chat.conversation_corpus import ConversationCorpus
from megalite.data.chat.conversation_encoding import ChatEncoding
from megalite.data.files.token_file import TokenFile
from megalite.data.files.trained_tokens import ids_of, is_trained
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.prepare.split import Split
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.errors import DataError
from tests.support.museum import exhibit
from tests.support.planted import Planted, instead
from tests.support.tiny import tiny_corpus

LENGTH = 60


def prepared(source: Path, tokenizer: Tokenizer, prefix: Path, length: int = LENGTH) -> Preparation:
    """The preparation of a file of prompts and completions."""
    template = load_chat_template(tokenizer.file.parent, "plain", tokenizer.end_of_document)
    chat = ChatEncoding(template, "answers", length, "drop")
    corpus = ConversationCorpus.open([str(source)])
    return Preparation(corpus, tokenizer, (prefix,), sequence_length=length, chat=chat)


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    texts = tiny_corpus(60)
    rows = [
        {"prompt": prompt, "completion": text} for prompt, text in zip(texts[::2], texts[1::2], strict=True)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "talks.jsonl"


@pytest.fixture
def file(talks: Path, tokenizer: Tokenizer, tmp_path: Path) -> TokenFile:
    prepare_outputs(prepared(talks, tokenizer, tmp_path / "talks"))
    return TokenFile.open(tmp_path / "talks")


@pytest.mark.parametrize("packing", ["best_fit", "first_fit", "greedy", "none"])
def test_every_conversation_stands_whole_in_one_row(file: TokenFile, packing: str) -> None:
    rows = ConversationRows(file, LENGTH, packing, seed=3)  # type: ignore[arg-type]
    read = rows.read(np.arange(len(rows)), pad_id=7)
    assert read.begins is not None
    documents, positions = documents_of(read.begins)
    found = []
    for row in range(len(rows)):
        for document in range(documents[row].max() + 1):
            mine = documents[row] == document
            assert (positions[row, mine] == np.arange(mine.sum())).all()
            ids, labels = read.input_ids[row, mine], read.labels[row, mine]
            if (labels == -100).all():
                assert (ids == 7).all() and mine[-1]  # padding, at the end
                assert mine.argmax() == read.lengths[row]
            else:
                found.append((ids.tolist(), labels.tolist()))
    expected = []
    for index in range(file.num_documents):
        tokens = file.document(index)
        ids, trained = ids_of(tokens), is_trained(tokens)
        expected.append((ids[:-1].tolist(), np.where(trained[1:], ids[1:], -100).tolist()))
    assert sorted(found) == sorted(expected)
    assert rows.fill == sum(len(ids) for ids, _ in expected) / (len(rows) * LENGTH)
    assert rows.fill == read.lengths.sum() / (len(rows) * LENGTH)


def test_concatenated_rows_are_full_and_have_every_label_once(file: TokenFile) -> None:
    length = 23  # shorter than most conversations
    rows = ConcatenatedRows(file, length)
    read = rows.read(np.arange(len(rows)), pad_id=7)
    positions = int((file.document_lengths - 1).sum())
    assert len(rows) == -(-positions // length) and rows.fill == positions / (len(rows) * length)
    expected_ids, expected_labels, begins = [], [], np.zeros(len(rows) * length, dtype=bool)
    for index in range(file.num_documents):
        tokens = file.document(index)
        begins[len(expected_ids)] = True
        expected_ids += ids_of(tokens)[:-1].tolist()
        expected_labels += [each if each >= 0 else -100 for each in tokens[1:].tolist()]
    ends = np.cumsum(file.document_lengths - 1)
    assert rows.cut == sum(
        (end - 1) // length > start // length for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    padding = len(rows) * length - positions
    assert 0 < padding < length and rows.cut > 4
    assert read.lengths.tolist() == [length] * (len(rows) - 1) + [length - padding]
    begins[positions] = True
    begins[::length] = True
    assert read.input_ids.ravel().tolist() == expected_ids + [7] * padding
    assert read.labels.ravel().tolist() == expected_labels + [-100] * padding
    assert read.begins is not None and (read.begins.ravel() == begins).all()
    chosen = rows.read(np.array([len(rows) - 1, 2]), pad_id=7)
    assert (chosen.labels == read.labels[[-1, 2]]).all()


def test_conversations_to_concatenate_are_prepared_whole(
    talks: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = prepared(talks, tokenizer, tmp_path / "whole", length=1000)
    prepare_outputs(whole)
    short = prepared(talks, tokenizer, tmp_path / "kept", length=9)
    assert short.chat is not None
    kept = replace(short, chat=replace(short.chat, too_long="keep"))
    [facts] = prepare_outputs(kept)
    assert facts.truncated_documents == facts.dropped_documents == 0
    both = [TokenFile.open(tmp_path / name) for name in ("whole", "kept")]
    assert both[0].tokens.tolist() == both[1].tokens.tolist()
    assert kept.chat is not None
    assert (
        replace(kept, chat=replace(kept.chat, sequence_length=10)).done() is not None
    )  # of no part in the tokens
    with pytest.raises(DataError, match=r'set data\.packing = "concatenate", or name'):
        rows_of(both[1], 9, "best_fit", 0)
    assert main(["data", "inspect", str(tmp_path / "kept"), "--documents", "0"]) == 0
    assert (
        f"filled by data.packing: concatenate {rows_of(both[1], 9, 'concatenate', 0).fill:.1%}\n"
        in capsys.readouterr().out
    )


def test_the_loader_gives_the_documents_of_the_rows(file: TokenFile) -> None:
    def samples_of(file: TokenFile, length: int) -> ConversationRows:
        return ConversationRows(file, length, "best_fit", seed=1)

    loader = StepLoader(
        [file, file], BatchShare(LENGTH, 3, 1), SampleOrder(4, weights=[2, 1]), samples_of=samples_of
    )
    batch, rows = loader.step_batch(6), samples_of(file, LENGTH)
    read = rows.read(batch.sample_ids.numpy() % len(rows), pad_id=0)
    assert read.begins is not None
    documents, positions = documents_of(read.begins)
    assert batch.document_ids is not None
    assert (batch.document_ids.numpy() == documents).all() and documents.max() > 0
    assert (batch.position_ids.numpy() == positions).all()
    assert (batch.labels.numpy() == read.labels).all()
    assert (batch.loss_mask.numpy() == (read.labels != -100)).all()


def test_a_file_of_longer_conversations_is_refused(file: TokenFile) -> None:
    longest = int(file.sequence_lengths.max())
    ConversationRows(file, longest - 1, "none", seed=0)
    with pytest.raises(
        DataError, match=rf"a conversation of {longest} tokens, .* raise it to {longest - 1}, set"
    ):
        ConversationRows(file, longest - 2, "none", seed=0)


def test_too_long_ones_are_counted(talks: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = prepared(talks, tokenizer, tmp_path / "whole", length=1000)
    [facts] = prepare_outputs(whole)
    assert (facts.kind, facts.dtype, facts.documents) == ("instruct", "int32", 30)
    assert facts.truncated_documents == facts.dropped_documents == 0
    lengths = np.sort(TokenFile.open(tmp_path / "whole").sequence_lengths)
    limit = int(lengths[20]) - 1
    [facts] = prepare_outputs(prepared(talks, tokenizer, tmp_path / "few", length=limit))
    longer = int((lengths > limit + 1).sum())
    assert (facts.documents, facts.dropped_documents) == (30 - longer, longer)
    assert longer > 0 and facts.largest_id < tokenizer.vocab_size
    tiny = prepared(talks, tokenizer, tmp_path / "none", length=1)
    with pytest.raises(DataError, match=r"all 30 conversations .*training.sequence_length = 1; raise it"):
        prepare_outputs(tiny)
    assert not list(tmp_path.glob("none*"))


@exhibit(
    "trl PR#6206",
    subject="data",
    there="text that had been tokenized with another chat template was used again from the cache",
    here="a changed template, `data.train_on`, length or `data.too_long` prepares the text anew",
    fault=Planted("megalite.data.chat.conversation_encoding:ChatEncoding.parts", instead([])),
)
def test_changed_settings_prepare_again(talks: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = prepared(talks, tokenizer, tmp_path / "out", length=1000)
    prepare_outputs(first)
    assert first.done() is not None and first.chat is not None
    for change in (
        {"train_on": "all"},
        {"sequence_length": 999},
        {"too_long": "truncate"},
        {"template": load_chat_template(tokenizer.file.parent, "alpaca")},
    ):
        assert replace(first, chat=replace(first.chat, **change)).done() is None, change  # type: ignore[arg-type]


def test_workers_and_parts_give_the_same_conversations(
    talks: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    whole = prepared(talks, tokenizer, tmp_path / "whole", length=1000)
    prepare_outputs(whole)
    names = (tmp_path / "a-train", tmp_path / "a-validation")
    prepare_outputs(replace(whole, outputs=names, split=Split((0.7, 0.3), 1)), workers=1)
    parts = [TokenFile.open(name) for name in names]
    together = sorted(part.document(index).tolist() for part in parts for index in range(part.num_documents))
    file = TokenFile.open(tmp_path / "whole")
    assert together == sorted(file.document(index).tolist() for index in range(file.num_documents))
    assert all(part.num_documents for part in parts)


def test_real_questions_fill_the_sequences(shared_data: Path, tmp_path: Path) -> None:
    source = tmp_path / "gsm8k.jsonl"
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:1000]))
    tokenizer = load_tokenizer(shared_data / "stories260K", end_of_document="</s>")
    prepare_outputs(prepared(source, tokenizer, tmp_path / "gsm8k", length=2048))
    file = TokenFile.open(tmp_path / "gsm8k")
    fills = {
        packing: ConversationRows(file, 2048, packing, seed=0).fill  # type: ignore[arg-type]
        for packing in ("best_fit", "first_fit", "greedy", "none")
    }
    assert file.num_documents == 1000
    assert min(fills["best_fit"], fills["first_fit"]) >= 0.98 > fills["greedy"] > 0.8 > fills["none"]


def tokens_of_a_bar(file: TokenFile) -> str:
    """The line of the conversations with 64 to 127 tokens, which are the most."""
    count = int(((file.document_lengths >= 64) & (file.document_lengths < 128)).sum())
    return f"64 to 127  {'#' * 40}  {count}"


def test_inspect_shows_what_is_trained(
    talks: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = talks.read_text().splitlines(keepends=True)
    talks.write_text("".join([*lines, lines[4], lines[4]]))
    prepare_outputs(prepared(talks, tokenizer, tmp_path / "out", length=1000))
    assert main(["data", "inspect", str(tmp_path / "out"), "--documents", "1", "--duplicates"]) == 0
    first = json.loads(lines[0])
    tokens = TokenFile.open(tmp_path / "out").document(0)
    end = tokenizer.end_of_document
    expected = (
        f"--- conversation 0, {len(tokens)} tokens, {int((tokens >= 0).sum())} trained\n"
        f"{first['prompt']}\n[[{first['completion']}{end}]]\n"
    )
    shown = capsys.readouterr().out
    assert shown.endswith(expected)
    assert (
        "\nrepeated: 2 documents (6.2%) with the tokens of an earlier one\n  document 4 occurs 3 times"
        in shown
    )
    file = TokenFile.open(tmp_path / "out")
    fill = ConversationRows(file, 1000, "best_fit", seed=0).fill
    assert f"best_fit {fill:.1%}" in shown and f"concatenate {ConcatenatedRows(file, 1000).fill:.1%}" in shown
    assert f"in the loss: {int((file.tokens >= 0).sum()):,} tokens" in shown
    assert f"  {tokens_of_a_bar(file)}\n" in shown
