"""The tokenizer and token file of a run: made once, made again when they must be, never changed under a run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from sentencepiece import SentencePieceProcessor

from megalite.config.sections.schema import RunConfig
from megalite.data.ensure import ensure_data
from megalite.data.files.prepared import prepared_facts
from megalite.data.files.token_file import TokenFile
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.errors import DataError
from tests.support.museum import exhibit
from tests.support.planted import Planted, instead
from tests.support.prepared_text import prepare
from tests.support.tiny import tiny_corpus
from tests.support.waiting import PATIENCE
from tests.unit.data.tokenizers.test_sentencepiece_model import VARIANTS, model

ROOT = Path(__file__).parents[3]


def ensure_train(config: RunConfig, run_folder: Path) -> Path:
    """The one token file that is trained on."""
    [prefix] = ensure_data(config, run_folder).train
    return prefix


def ensure_tokenizer(config: RunConfig, run_folder: Path) -> Path:
    """The folder of the run's tokenizer."""
    folder = ensure_data(config, run_folder).tokenizer
    assert folder is not None
    return folder


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def config(source: Path | str | list[str], **sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {**SHAPE, **sections.get("model", {})},
            "training": {"steps": 1, "sequence_length": 16, "micro_batch_size": 1, "global_batch_size": 1},
            "tokenizer": sections.get("tokenizer", {"vocab_size": 300}),
            "data": {
                "source": source if isinstance(source, list) else str(source),
                **sections.get("data", {}),
            },
            "checkpoint": sections.get("checkpoint", {}),
        }
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in tiny_corpus()))
    return tmp_path / "text.jsonl"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def with_checkpoint(run_folder: Path) -> None:
    (run_folder / "checkpoints").mkdir()
    (run_folder / "checkpoints" / "latest").write_text("step-000001")


def times(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_run_gets_its_tokenizer_and_its_token_file_once(text: Path, run_folder: Path) -> None:
    folder = ensure_tokenizer(config(text), run_folder)
    prefix = ensure_train(config(text), run_folder)
    assert (folder, prefix) == (run_folder / "tokenizer", run_folder / "data" / "train")
    assert load_tokenizer(folder).vocab_size == 300
    assert TokenFile.open(prefix).num_documents == len(tiny_corpus())
    made = times(run_folder)
    assert (ensure_tokenizer(config(text), run_folder), ensure_train(config(text), run_folder)) == (
        folder,
        prefix,
    )
    assert times(run_folder) == made


def test_other_text_or_settings_make_them_again(text: Path, run_folder: Path) -> None:
    ensure_train(config(text), run_folder)
    assert (
        load_tokenizer(ensure_tokenizer(config(text, tokenizer={"vocab_size": 310}), run_folder)).vocab_size
        == 310
    )
    text.write_text(text.read_text() * 2)
    facts = prepared_facts(ensure_train(config(text), run_folder))
    assert facts is not None and (facts.documents, facts.vocab_size) == (2 * len(tiny_corpus()), 300)


def test_nothing_changes_under_a_run_with_checkpoints(text: Path, run_folder: Path) -> None:
    prefix = ensure_train(config(text), run_folder)
    with_checkpoint(run_folder)
    before = times(run_folder)
    ensure_train(config(text), run_folder)
    text.write_text(text.read_text() * 2)
    with pytest.raises(
        DataError,
        match=r"checkpoints in .*run depend on the earlier version; set run\.folder to a new folder",
    ):
        ensure_train(config(text), run_folder)
    assert times(run_folder) == before
    # The two ways out that the message names.
    assert ensure_train(config(prefix), run_folder) == prefix
    assert times(run_folder) == before
    facts = prepared_facts(ensure_train(config(text, checkpoint={"resume": "never"}), run_folder))
    assert facts is not None and facts.documents == 2 * len(tiny_corpus())


def test_the_token_file_alone_is_protected_too(text: Path, run_folder: Path, tokenizer: Tokenizer) -> None:
    given = {"path": str(tokenizer.file.parent)}
    ensure_train(config(text, tokenizer=given), run_folder)
    with_checkpoint(run_folder)
    text.write_text(text.read_text() * 2)
    with pytest.raises(DataError, match=r"since .*data/train was made"):
        ensure_train(config(text, tokenizer=given), run_folder)


def test_a_given_tokenizer_is_used_where_it_lies(text: Path, run_folder: Path, tokenizer: Tokenizer) -> None:
    for given in (tokenizer.file.parent, tokenizer.file):
        settings = config(text, tokenizer={"path": str(given)})
        assert ensure_tokenizer(settings, run_folder) == tokenizer.file.parent
    prefix = ensure_train(settings, run_folder)
    assert TokenFile.open(prefix).document(0)[:-1].tolist() == tokenizer.encode(tiny_corpus()[0])
    assert not (run_folder / "tokenizer").exists()


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_prepared_files_bring_their_tokenizer(
    text: Path, tmp_path: Path, run_folder: Path, tokenizer: Tokenizer, suffix: str
) -> None:
    prepare(Corpus.open([str(text)]), tokenizer, tmp_path / "corpus.v1")
    settings = config(f"{tmp_path}/corpus.v1{suffix}", tokenizer={})
    assert ensure_train(settings, run_folder) == tmp_path / "corpus.v1"
    assert ensure_tokenizer(settings, run_folder) == tokenizer.file.parent
    assert not run_folder.exists()


def test_prepared_text_is_not_read_as_conversations(
    text: Path, tmp_path: Path, run_folder: Path, tokenizer: Tokenizer
) -> None:
    prepare(Corpus.open([str(text)]), tokenizer, tmp_path / "x")
    settings = config(tmp_path / "x", tokenizer={}, data={"kind": "instruct"})
    with pytest.raises(DataError, match=r"x was prepared as 'text', and data\.kind is 'instruct'"):
        ensure_data(settings, run_folder)


def test_prepared_files_and_the_tokenizer_must_belong_together(
    text: Path, tmp_path: Path, run_folder: Path, tokenizer: Tokenizer
) -> None:
    prefix = tmp_path / "x"
    prepare(Corpus.open([str(text)]), tokenizer, prefix)
    other = ensure_tokenizer(config(text), run_folder)
    with pytest.raises(
        DataError, match=r"x was prepared with .*, and the run's tokenizer is .*; set tokenizer\.path"
    ):
        ensure_train(config(prefix, tokenizer={"path": str(other)}), run_folder)
    with pytest.raises(DataError, match="cannot be one of several sources"):
        ensure_train(config([str(text), str(prefix)]), run_folder)
    (tmp_path / "x.json").unlink()
    # Files of another program say nothing of a tokenizer, and are believed where the model has their ids.
    believed = config(prefix, tokenizer={"path": str(other)}, model={"vocab_size": tokenizer.vocab_size})
    assert ensure_train(believed, run_folder) == prefix


def test_a_vanished_tokenizer_of_prepared_files_is_named(
    text: Path, tmp_path: Path, run_folder: Path
) -> None:
    folder = ensure_tokenizer(config(text), run_folder)
    prepare(Corpus.open([str(text)]), load_tokenizer(folder), tmp_path / "x")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        DataError, match=r"tokenizer\.json, which does not exist any more; set tokenizer\.path"
    ):
        ensure_train(config(tmp_path / "x"), run_folder)


def test_a_tokenizer_file_of_another_name_is_refused(text: Path, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_text("{}")
    with pytest.raises(DataError, match=r"not called tokenizer\.json"):
        ensure_tokenizer(config(text, tokenizer={"path": str(tmp_path / "tok.json")}), run_folder)


def test_a_short_text_gets_the_vocabulary_that_it_supports(text: Path, run_folder: Path) -> None:
    reached = {}
    for kind in ("bpe", "unigram"):
        folder = ensure_tokenizer(config(text, tokenizer={"kind": kind}), run_folder / kind)
        reached[kind] = load_tokenizer(folder).vocab_size
        made = times(run_folder / kind)
        ensure_tokenizer(config(text, tokenizer={"kind": kind}), run_folder / kind)
        assert times(run_folder / kind) == made
    assert 256 < reached["bpe"] <= 512 and 256 < reached["unigram"] <= 512
    (run_folder / "a.txt").write_text("a short line, and then one more of them\n" * 9)
    folder = ensure_tokenizer(config(run_folder / "a.txt", tokenizer={}), run_folder / "short")
    assert 257 < load_tokenizer(folder).vocab_size < 300
    small = config(text, tokenizer={}, model={"vocab_size": 290})
    assert load_tokenizer(ensure_tokenizer(small, run_folder / "bounded")).vocab_size == 290


def test_errors_of_the_training_process_arrive(text: Path, run_folder: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary of \d+ only, not 60000"):
        ensure_tokenizer(config(text, tokenizer={"vocab_size": 60000}), run_folder)


def test_the_process_can_be_forked_afterwards(text: Path, run_folder: Path) -> None:
    script = f"""if True:
        import os, re
        from pathlib import Path
        from tests.unit.data.test_ensure import config, ensure_train, ensure_tokenizer, load_tokenizer

        def threads():
            return int(re.search(r"Threads:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

        before = threads()
        settings, folder = config({str(text)!r}), Path({str(run_folder)!r})
        ensure_train(settings, folder)
        tokenizer = load_tokenizer(ensure_tokenizer(settings, folder))
        assert threads() == before, (threads(), before)
        if os.fork():
            assert os.wait()[1] == 0
        else:
            tokenizer.backend.encode_batch(["a pipeline", "one rank"])
            os._exit(0)
    """
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    # tokenizers would complain on stderr of a fork after a parallel region.
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("kind", ["unigram", "sentencepiece_bpe"])
def test_a_sentencepiece_tokenizer_is_trained_for_a_run(text: Path, run_folder: Path, kind: str) -> None:
    settings = config(text, tokenizer={"vocab_size": 280, "kind": kind})
    prefix = ensure_train(settings, run_folder)
    tokenizer = load_tokenizer(run_folder / "tokenizer")
    file = TokenFile.open(prefix)
    shown = [tokenizer.decode(file.document(index)[:-1].tolist()) for index in range(file.num_documents)]
    assert shown == tiny_corpus()
    made = times(run_folder)
    ensure_train(settings, run_folder)
    assert times(run_folder) == made
    # Another kind is another tokenizer, and leaves no model of the first beside it.
    ensure_train(config(text, tokenizer={"vocab_size": 280}), run_folder)
    assert sorted(path.name for path in (run_folder / "tokenizer").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
        "trained_from.json",
    ]


def test_a_sentencepiece_model_is_converted_into_the_run(
    text: Path, run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.model").write_bytes(model("unigram", **VARIANTS["llama"]))
    settings = config(text, tokenizer={"path": str(tmp_path / "a.model")})  # its own end is </s>
    prefix = ensure_train(settings, run_folder)
    assert ensure_tokenizer(settings, run_folder) == run_folder / "tokenizer"
    processor = SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
    assert TokenFile.open(prefix).document(0).tolist() == [
        *processor.encode(tiny_corpus()[0]),
        processor.eos_id(),
    ]
    made = times(run_folder)
    ensure_train(settings, run_folder)
    assert times(run_folder) == made
    with_checkpoint(run_folder)
    (tmp_path / "a.model").write_bytes(model("bpe", **VARIANTS["llama"]))
    with pytest.raises(DataError, match=r"checkpoints in .*run depend on the earlier version"):
        ensure_train(settings, run_folder)
    assert times(run_folder) == {**made, str(run_folder / "checkpoints" / "latest"): ANY}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    texts = [f"{text} and more" for text in tiny_corpus(12)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"body": each}) + "\n" for each in texts))
    return tmp_path / "other.jsonl"


def counts(prefixes: Sequence[Path]) -> list[int]:
    return [TokenFile.open(prefix).num_documents for prefix in prefixes]


def test_documents_are_held_out_by_share(text: Path, run_folder: Path) -> None:
    settings = config(text, data={"split": [0.5, 0.25, 0.25]})
    data = ensure_data(settings, run_folder)
    assert (data.train, data.weights) == ((run_folder / "data" / "train",), (1.0,))
    assert (data.validation, data.test) == (
        (run_folder / "data" / "validation",),
        (run_folder / "data" / "test",),
    )
    assert sum(counts([*data.train, *data.validation, *data.test])) == len(tiny_corpus())
    made = times(run_folder)
    assert ensure_data(settings, run_folder) == data
    assert times(run_folder) == made
    with_checkpoint(run_folder)
    with pytest.raises(DataError, match=r"since .*data/train was made, and the checkpoints"):
        ensure_data(config(text, data={"split": [0.6, 0.4]}), run_folder)


def test_validation_text_of_its_own(text: Path, other: Path, run_folder: Path) -> None:
    other.write_text(other.read_text().replace('"body"', '"text"'))
    data = ensure_data(config(text, data={"validation": str(other)}), run_folder)
    assert counts(data.train) == [40] and counts(data.validation) == [12] and not data.test
    # Held-out text does not shape the tokenizer.
    alone = ensure_tokenizer(config(text), run_folder / "alone")
    assert (alone / "tokenizer.json").read_bytes() == (
        run_folder / "tokenizer" / "tokenizer.json"
    ).read_bytes()


def test_the_same_file_under_another_name_does_not_validate(text: Path, run_folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.validation: .*text\.jsonl is also training data; name other text"
    ):
        ensure_data(config(text, data={"validation": [str(text.parent)], "pattern": "*.jsonl"}), run_folder)


def blend(*parts: dict[str, Any], **data: Any) -> RunConfig:
    return config("unused", data={"source": None, "blend": list(parts), **data})


def test_sets_by_weight_each_in_files_of_its_own(text: Path, other: Path, run_folder: Path) -> None:
    settings = blend(
        {"source": str(text), "weight": 3},
        {"source": str(other), "weight": 1.5, "text_column": "body"},
        split=[0.5, 0.5],
    )
    data = ensure_data(settings, run_folder)
    folder = run_folder / "data"
    assert data.train == (folder / "train-0", folder / "train-1") and data.weights == (3, 1.5)
    assert data.validation == (folder / "validation-0", folder / "validation-1") and not data.test
    halves = zip(counts(data.train), counts(data.validation), strict=True)
    assert [sum(each) for each in halves] == [40, 12]
    made = times(run_folder)
    assert ensure_data(settings, run_folder) == data
    assert times(run_folder) == made


def test_text_and_prepared_files_by_weight(text: Path, other: Path, run_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ensure_tokenizer(config(text), tmp_path / "first"))
    prepare(Corpus.open([str(other)], text_column="body"), tokenizer, tmp_path / "x")
    parts = ({"source": str(text), "weight": 1}, {"source": str(tmp_path / "x"), "weight": 1})
    data = ensure_data(blend(*parts), run_folder)
    assert data.train == (run_folder / "data" / "train-0", tmp_path / "x")
    assert not (run_folder / "tokenizer").exists()  # the prepared files brought theirs
    with pytest.raises(DataError, match=r"x is a prepared token file, and data\.split divides text only"):
        ensure_data(blend(*parts, split=[0.5, 0.5]), run_folder / "other")
    with pytest.raises(DataError, match=r"x was prepared with min_length 0, not data\.min_length = 3"):
        ensure_data(blend(*parts, min_length=3), run_folder / "other")


def test_short_documents_are_left_out_of_a_run(text: Path, run_folder: Path) -> None:
    every = TokenFile.open(ensure_train(config(text), run_folder / "all"))
    # Without the token that ends a document.
    lengths = sorted(len(every.document(index)) - 1 for index in range(every.num_documents))
    middle = lengths[len(lengths) // 2]
    facts = prepared_facts(ensure_train(config(text, data={"min_length": middle}), run_folder / "long"))
    assert facts is not None and facts.short_documents == sum(length < middle for length in lengths) > 0
    assert facts.documents + facts.short_documents == len(tiny_corpus())


def test_documents_that_do_not_end_cannot_be_told_apart(text: Path, run_folder: Path, tmp_path: Path) -> None:
    folder = ensure_tokenizer(config(text), tmp_path / "first")
    prepare(Corpus.open([str(text)]), load_tokenizer(folder), tmp_path / "x")
    tokenizer = {"path": str(folder), "end_of_document": "a"}
    ensure_data(config(tmp_path / "x", tokenizer=tokenizer), run_folder)
    ensure_data(config(tmp_path / "x", data={"document_mask": True}), run_folder)
    with pytest.raises(DataError, match=r"x\.bin: document 0 ends in id 0, .*set tokenizer\.end_of_document"):
        ensure_data(config(tmp_path / "x", tokenizer=tokenizer, data={"document_mask": True}), run_folder)


def moved(folder: Path, new: Path) -> Path:
    """A folder on another cluster: other places, other times."""
    shutil.copytree(folder, new)
    for path in new.rglob("*"):
        os.utime(path, ns=(1, 1))
    shutil.rmtree(folder)
    return new


@exhibit(
    "axolotl#3303",
    subject="data",
    there="another output folder was reason enough to tokenize the same text again",
    here="a run that moved with its text uses the token files that it has",
    fault=Planted(
        "megalite.data.text.corpus:Corpus.content_fingerprint",
        instead(property(lambda corpus: corpus.stat_fingerprint)),
        seen_as=(DataError,),
    ),
)
def test_a_run_that_moved_with_its_text_goes_on(text: Path, tmp_path: Path) -> None:
    """Contents decide, not places and times; then a changed text is still noticed."""
    old = tmp_path / "old"
    old.mkdir()
    text.rename(old / "text.jsonl")
    settings: dict[str, Any] = {"data": {"split": [0.8, 0.2]}}
    ensure_data(config(old / "text.jsonl", **settings), old / "run")
    with_checkpoint(old / "run")
    new = moved(old, tmp_path / "new")
    before = {path: path.read_bytes() for path in (new / "run").rglob("*.bin")}
    data = ensure_data(config(new / "text.jsonl", **settings), new / "run")
    assert (
        data.tokenizer == new / "run" / "tokenizer" and {path: path.read_bytes() for path in before} == before
    )
    made = times(new / "run")
    ensure_data(config(new / "text.jsonl", **settings), new / "run")
    assert times(new / "run") == made
    # The pair alone is known by its tokenizer beside it.
    pair = config(new / "run" / "data" / "train", tokenizer={})
    assert ensure_data(pair, tmp_path / "other").tokenizer == (new / "run" / "tokenizer").resolve()
    same_size = (new / "text.jsonl").read_text().replace("rank", "Rank", 1)
    (new / "text.jsonl").write_text(same_size)
    os.utime(new / "text.jsonl", ns=(1, 1))
    os.utime(new / "text.jsonl")
    with pytest.raises(DataError, match=r"the text or the tokenizer settings changed since"):
        ensure_data(config(new / "text.jsonl", **settings), new / "run")


def test_a_changed_text_is_noticed_with_a_given_tokenizer(
    text: Path, run_folder: Path, tokenizer: Tokenizer
) -> None:
    settings = config(text, tokenizer={"path": str(tokenizer.file)})
    ensure_train(settings, run_folder)
    with_checkpoint(run_folder)
    made = times(run_folder)
    text.touch()
    ensure_train(settings, run_folder)
    changed = {path for path, when in times(run_folder).items() if made.get(path) != when}
    assert changed == {str(run_folder / "data" / "train.json")}
    text.write_text(text.read_text().replace("rank", "Rank", 1))
    with pytest.raises(DataError, match=r"since .*data/train was made"):
        ensure_train(settings, run_folder)


def test_a_single_text_is_split_by_tokens_and_the_start_says_so(tmp_path: Path, run_folder: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(tiny_corpus()))
    settings = config(tmp_path / "book.txt", data={"split": [0.9, 0.1]})
    for _ in range(2):
        data = ensure_data(settings, run_folder)
        [note] = data.notes
        files = [TokenFile.open(*prefixes) for prefixes in (data.train, data.validation)]
        counts = " for train, ".join(f"{file.num_tokens:,}" for file in files)
        assert note.endswith(
            f"book.txt has too few documents and is split by tokens: {counts} for validation"
        )
        assert files[1].num_tokens % 16 == 1


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("data.source", {}),
        ("data.validation", {"validation": "{}"}),
        ("data.blend[2].source", {"source": None, "blend": [("text", 1), ("{}", 1)]}),
    ],
)
@pytest.mark.parametrize("content", [None, " \n"])
def test_a_missing_or_blank_text_is_named_with_its_setting(
    text: Path, run_folder: Path, key: str, data: dict[str, Any], content: str | None
) -> None:
    wrong = text.with_name("wrong.txt")
    if content is not None:
        wrong.write_text(content)
    names = {"{}": str(wrong), "text": str(text)}
    if "blend" in data:
        data = {
            **data,
            "blend": [{"source": names[name], "weight": weight} for name, weight in data["blend"]],
        }
    if "validation" in data:
        data = {"validation": str(wrong)}
    said = "does not exist" if content is None else r"has no text \(1 file with 2 bytes"
    source = text if key == "data.validation" else wrong
    with pytest.raises(DataError, match=rf"^{re.escape(key)}: .*wrong\.txt {said}"):
        ensure_data(config(source, data=data), run_folder)
    assert not run_folder.exists()


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path, run_folder: Path) -> None:
    (tmp_path / "a.txt").write_text("eight words and no more than a few")
    long = config(tmp_path / "a.txt", tokenizer={}).model_dump()
    long["training"]["sequence_length"] = 4096
    with pytest.raises(
        DataError, match=r"^data\.source: .*a\.txt has (\d+) tokens, fewer than one seq"
    ) as found:
        ensure_data(RunConfig.model_validate(long), run_folder)
    fitting = re.search(r"training\.sequence_length to (\d+) or less", str(found.value))
    assert fitting is not None
    long["training"]["sequence_length"] = int(fitting[1])
    assert ensure_data(RunConfig.model_validate(long), run_folder).train


def foreign_pair(text: Path, tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A pair as Megatron-LM writes it: nothing beside it says what its ids mean."""
    prepare(Corpus.open([str(text)]), tokenizer, tmp_path / "ids")
    (tmp_path / "ids.json").unlink()
    return tmp_path / "ids"


def test_a_pair_without_a_tokenizer_needs_the_models_vocabulary(
    text: Path, tmp_path: Path, run_folder: Path, tokenizer: Tokenizer
) -> None:
    pair = foreign_pair(text, tmp_path, tokenizer)
    largest = int(TokenFile.open(pair).tokens.max())
    with pytest.raises(DataError, match=rf'^model\.vocab_size: "auto" .* set it to {largest + 1} or more'):
        ensure_data(config(pair, tokenizer={}), run_folder)
    rows = {"vocab_size": largest + 1}
    data = ensure_data(config(pair, tokenizer={}, model=rows), run_folder)
    assert data.tokenizer is None and data.train == (pair,)
    with pytest.raises(DataError, match=r"data\.document_mask looks for .*; set tokenizer\.path"):
        ensure_data(config(pair, tokenizer={}, model=rows, data={"document_mask": True}), run_folder)
    with pytest.raises(
        DataError, match=r"^tokenizer\.vocab_size: 300 .*, with no tokenizer; set model\.vocab_size"
    ):
        ensure_data(config(pair, model=rows), run_folder)


def test_ids_outside_the_vocabulary_are_found_at_the_start_by_one_pass(
    text: Path, tmp_path: Path, run_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = foreign_pair(text, tmp_path, tokenizer)
    largest = int(TokenFile.open(pair).tokens.max())
    small = config(pair, tokenizer={}, model={"vocab_size": largest})
    for passes in ("a pass", "none"):
        if passes == "none":
            monkeypatch.setattr(
                "megalite.data.prepare.token_ids._CHUNK_TOKENS", 0
            )  # a second pass would fail
        with pytest.raises(
            DataError, match=rf"ids\.bin: its largest id, {largest}, is outside .* to {largest + 1} or"
        ):
            ensure_data(small, run_folder)
    # Our own files record it.
    facts = prepared_facts(ensure_train(config(text), tmp_path / "own"))
    assert (
        facts is not None
        and facts.largest_id == TokenFile.open(tmp_path / "own" / "data" / "train").tokens.max()
    )


def test_a_vocabulary_size_for_a_prepared_pair_is_not_ignored(
    text: Path, tmp_path: Path, run_folder: Path, tokenizer: Tokenizer
) -> None:
    prepare(Corpus.open([str(text)]), tokenizer, tmp_path / "x")
    size = tokenizer.vocab_size
    with pytest.raises(
        DataError,
        match=rf"^tokenizer\.vocab_size: {size + 1} .*x\.bin is prepared .* of {size} ids; leave it out",
    ):
        ensure_data(config(tmp_path / "x", tokenizer={"vocab_size": size + 1}), run_folder)
    assert ensure_data(config(tmp_path / "x", tokenizer={"vocab_size": size}), run_folder).train


def test_preparation_says_at_once_what_it_does(
    text: Path, run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.monitor.preparation.LINE_SECONDS", 0.0)
    ensure_data(config(text), run_folder)
    size, count = text.stat().st_size / 1e3, len(tiny_corpus())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"training a tokenizer of 300 ids on {size:.1f} kB (1 file)"
    assert any(re.fullmatch(r"tokenizer: 300 ids in \d+\.\d s", line) for line in lines)
    begun = lines.index(f"tokenizing {size:.1f} kB of text (1 file)")
    assert re.fullmatch(r"  0\.0 of [\d.]+ kB, [\d,]+ tokens, [\d,]+ tokens/s", lines[begun + 1])
    assert re.fullmatch(rf"data: {count} documents, [\d,]+ tokens in \d+\.\d s", lines[-1])
    ensure_data(config(text), run_folder)
    assert capsys.readouterr().out == ""
