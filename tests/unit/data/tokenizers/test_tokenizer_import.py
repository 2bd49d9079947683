"""Tokenizers in other forms: what is found in a file or folder, and what is written of it."""

import json
import shutil
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from megalite.data.tokenizers.sentencepiece_model import PROBE_TEXTS
from megalite.data.tokenizers.tokenizer import load_tokenizer, save_tokenizer
from megalite.data.tokenizers.tokenizer_import import foreign_tokenizer, import_tokenizer
from megalite.data.tokenizers.tokenizer_training import train_bpe
from megalite.errors import DataError
from tests.support.tiny import tiny_corpus, tiny_tokenizer
from tests.unit.data.tokenizers.test_sentencepiece_model import VARIANTS, model
from tests.unit.data.tokenizers.test_tokenizer_training import pieces


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("named", ["spm.model", "spm.vocab", "", "folder with tokenizer.model"])
def test_a_sentencepiece_model_by_every_name(source: Path, tmp_path: Path, named: str) -> None:
    file = source / ("tokenizer.model" if named.startswith("folder") else "spm.model")
    file.write_bytes(model("bpe", **VARIANTS["llama"]))
    (source / "spm.vocab").write_text("<unk>\t0\n")
    path = source / named if named.startswith("spm") else source
    import_tokenizer(path, tmp_path / "out", "</s>")
    processor = SentencePieceProcessor(model_file=str(file))
    ours = load_tokenizer(tmp_path / "out", end_of_document="</s>")
    assert [ours.encode(text) for text in PROBE_TEXTS] == [processor.encode(text) for text in PROBE_TEXTS]
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == file.read_bytes()
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert [config[f"{name}_token"] for name in ("bos", "eos", "unk")] == ["<s>", "</s>", "<unk>"]


def test_a_folder_with_a_tokenizer_json_is_used_as_it_is(source: Path) -> None:
    tiny_tokenizer(source)
    (source / "tokenizer.model").write_bytes(b"beside it, and older")
    assert foreign_tokenizer(source) is None
    assert foreign_tokenizer(source / "tokenizer.json") is None
    assert foreign_tokenizer(source / "nowhere") is None


def test_a_hugging_face_folder_is_copied_and_a_bare_file_gets_its_configuration(
    source: Path, tmp_path: Path
) -> None:
    save_tokenizer(train_bpe(pieces(tiny_corpus()), 300), source)
    import_tokenizer(source, tmp_path / "copy", "<|endoftext|>")
    (source / "tokenizer_config.json").unlink()
    import_tokenizer(source / "tokenizer.json", tmp_path / "bare", "<|endoftext|>")
    ids = [
        load_tokenizer(each).encode(" a pipeline") for each in (source, tmp_path / "copy", tmp_path / "bare")
    ]
    assert ids[0] == ids[1] == ids[2]
    assert (tmp_path / "bare" / "tokenizer_config.json").exists()


def gpt2(shared_data: Path, folder: Path) -> None:
    shutil.copyfile(shared_data / "tokenizers" / "gpt2_vocab.json", folder / "vocab.json")
    shutil.copyfile(shared_data / "tokenizers" / "gpt2_merges.txt", folder / "merges.txt")


def test_gpt2s_two_files(source: Path, tmp_path: Path, shared_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2(shared_data, source)
    import_tokenizer(source, tmp_path / "out", "<|endoftext|>")
    ours = load_tokenizer(tmp_path / "out")
    assert (ours.vocab_size, ours.end_of_document_id) == (50257, 50256)
    assert ours.encode("Hello world") == [15496, 995]
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text()[:20_000]
    for theirs in (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
        transformers.GPT2TokenizerFast(vocab=str(source / "vocab.json"), merges=str(source / "merges.txt")),
    ):
        for each in [*PROBE_TEXTS, text, "two<|endoftext|>documents"]:
            assert theirs(each)["input_ids"] == ours.encode(each)


def test_other_vocabularies_and_damaged_files_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "vocab.json").write_text('{"a": 0, "b": 1, "<|endoftext|>": 2}')
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(
        DataError, match=r"merges\.txt and vocab\.json do not fit each other .*copy both again"
    ):
        import_tokenizer(source, tmp_path / "out", "<|endoftext|>")
    with pytest.raises(DataError, match=r"vocab\.json has no token '</s>'; set tokenizer\.end_of_document"):
        import_tokenizer(source, tmp_path / "out", "</s>")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(
        DataError, match=r"vocabulary of a RobertaTokenizer .*only GPT-2's needs none.*save_pretrained"
    ):
        import_tokenizer(source, tmp_path / "out", "<|endoftext|>")
    (source / "tokenizer_config.json").unlink()
    for content, said in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (source / "vocab.json").write_text(content)
        with pytest.raises(DataError, match=rf"vocab\.json {said}"):
            import_tokenizer(source, tmp_path / "out", "<|endoftext|>")
    assert not (tmp_path / "out").exists()


def test_a_vocab_without_its_model_is_refused(source: Path) -> None:
    (source / "spm.vocab").write_text("<unk>\t0\n")
    with pytest.raises(DataError, match=r"spm\.vocab has the pieces only.*name the sentencepiece \.model"):
        foreign_tokenizer(source / "spm.vocab")


def test_a_sentencepiece_model_without_the_end_of_document_lists_what_it_has(
    source: Path, tmp_path: Path
) -> None:
    (source / "x.model").write_bytes(model("bpe", **VARIANTS["llama"]))
    with pytest.raises(
        DataError, match=r"no token '<\|endoftext\|>'; set tokenizer\.end_of_document .*'</s>'"
    ):
        import_tokenizer(source / "x.model", tmp_path / "out", "<|endoftext|>")
    with pytest.raises(DataError, match=r"nowhere\.model cannot be read"):
        import_tokenizer(source / "nowhere.model", tmp_path / "out", "</s>")
