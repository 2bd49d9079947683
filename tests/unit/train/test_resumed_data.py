"""A run that goes on from a checkpoint with other text, streamed files or tokenizer is refused, or says so."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.folder import LATEST, published_name, read_manifest
from megalite.checkpoint.manifest import MANIFEST, Manifest, Stream
from megalite.checkpoint.manifest_json import to_json
from megalite.config.sections.schema import RunConfig
from megalite.data.ensure import RunData, ensure_data
from megalite.data.files.fingerprint import content_fingerprint
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer_training import train_into
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.topology.axes import Layout
from megalite.train.checkpoints.resume_check import ResumeCheck
from megalite.train.inputs import prepare_inputs
from megalite.train.run_folder import RunFolder
from tests.support.museum import exhibit
from tests.support.planted import Planted, instead
from tests.support.tiny import tiny_corpus

STEP = 3
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def write_text(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_text(folder / "text.jsonl", tiny_corpus())
    pieces = (piece for piece, _ in Corpus.open([str(folder / "text.jsonl")]).pieces())
    train_into(folder, pieces, 300, at_most=True, kind="bpe", end_of_document="<|endoftext|>")
    return folder


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Path) -> Path:
    """a.jsonl and b.jsonl, and a tokenizer."""
    write_text(tmp_path / "a.jsonl", tiny_corpus())
    write_text(tmp_path / "b.jsonl", tiny_corpus()[::-1])
    (tmp_path / "tokenizer").symlink_to(tokenizer)
    return tmp_path


def run_of(folder: Path, **data: Any) -> RunConfig:
    checkpoint = {"resume_changed": True} if data.pop("told", False) else {}
    return RunConfig.model_validate(
        {
            "run": {"folder": str(folder / "run")},
            "model": {**SHAPE, "num_key_value_heads": 4, "max_position_embeddings": 64},
            "parallel": {"data": 1},
            "training": {
                "steps": 9,
                "sequence_length": 16,
                "micro_batch_size": 1,
                "micro_batches": 2,
                "global_batch_size": 2,
            },
            "tokenizer": {"path": str(folder / "tokenizer")},
            "data": {"source": str(folder / "a.jsonl"), "workers": 1, **data},
            "checkpoint": checkpoint,
        }
    )


def start(config: RunConfig, *, data: bool = True) -> RunData:
    """Make the data of a run, and a checkpoint of it after STEP steps. data: whether it has fingerprints."""
    root = Path(config.run.folder)
    made = ensure_data(config, root)
    stream = None
    if made.stream:
        stream = Stream(
            tuple((file.path.name, file.size_bytes) for file in made.stream), ((0, 0, 0, 0, 0),) * 2
        )
    manifest = Manifest(
        megalite="0",
        torch="2",
        trainer_state={"step": STEP, "samples": 2 * STEP, "tokens": 32 * STEP},
        layout=Layout(),
        stage_layers=((0, 1),),
        model=config.shape(300),
        config=config.model_dump(mode="json"),
        optimizer={},
        tensors={},
        files={},
        stream=stream,
        data=made.fingerprints if data else {},
    )
    checkpoint = root / "checkpoints" / published_name(STEP)
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text(to_json(manifest))
    (checkpoint.parent / LATEST).write_text(checkpoint.name)
    return made


def resume(config: RunConfig) -> tuple[str, ...]:
    """The notes of a run that goes on."""
    return prepare_inputs(config, RunFolder(Path(config.run.folder))).data.notes


def overwrite(path: Path) -> None:
    """Change one letter, and nothing that a listing of the folder shows."""
    about, text = path.stat(), path.read_text()
    at = text.index('"text": "') + len('"text": "')
    path.write_text(f"{text[:at]}{'x' if text[at] != 'x' else 'y'}{text[at + 1 :]}")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)


def test_the_same_text_elsewhere_goes_on(folder: Path) -> None:
    start(run_of(folder))
    assert resume(run_of(folder)) == ()
    (folder / "a.jsonl").rename(folder / "moved.jsonl")
    assert resume(run_of(folder, source=str(folder / "moved.jsonl"))) == ()


def test_token_files_without_a_tokenizer_may_get_one_later(folder: Path) -> None:
    config, recorded = run_of(folder), {"data.source": "tokens"}
    start(config)
    checkpoint = Path(config.run.folder) / "checkpoints" / published_name(STEP)
    (checkpoint / MANIFEST).write_text(to_json(replace(read_manifest(checkpoint), data=recorded)))
    check = ResumeCheck(checkpoint, config)
    assert (
        check.require_same_data(RunData(None, (), (), fingerprints={**recorded, "tokenizer.path": "ids"}))
        == []
    )
    with pytest.raises(ConfigError, match=r"data.source: not the text of the steps before"):
        check.require_same_data(RunData(None, (), (), fingerprints={"tokenizer.path": "ids"}))


@exhibit(
    "axolotl PR#3427",
    subject="data",
    there="tokenized rows were used again from the cache after a setting of the rows had changed",
    here="text with another content is noticed, even at the size and the time that it had",
    fault=Planted("megalite.data.text.corpus:Corpus.content_fingerprint", instead(property(lambda _: ""))),
)
def test_text_overwritten_at_its_size_and_time_is_noticed(folder: Path) -> None:
    start(run_of(folder))
    overwrite(folder / "a.jsonl")
    with pytest.raises(
        DataError, match=r"the text or the tokenizer settings changed .*resume_changed = true"
    ):
        resume(run_of(folder))
    [note] = resume(run_of(folder, told=True))
    assert note.startswith("data.source: not the text of the steps") and "written anew" in note


def test_the_changed_settings_of_the_text_are_named(folder: Path) -> None:
    start(run_of(folder))
    with pytest.raises(DataError, match=r"data.min_length 0 -> 5, data.source .*b.jsonl changed since"):
        resume(run_of(folder, source=str(folder / "b.jsonl"), min_length=5))


@pytest.mark.parametrize("overwritten", [False, True], ids=["another file", "overwritten"])
def test_a_stream_of_other_text_is_refused(folder: Path, overwritten: bool) -> None:
    start(run_of(folder, streaming=True))
    assert resume(run_of(folder, streaming=True)) == ()
    if overwritten:
        overwrite(folder / "a.jsonl")
        now: dict[str, Any] = {}
    else:
        write_text(folder / "b.jsonl", [*tiny_corpus(), "more"])
        now = {"source": str(folder / "b.jsonl")}
    with pytest.raises(ConfigError, match=r"data.source: .*resume_changed = true"):
        resume(run_of(folder, streaming=True, **now))
    assert len(resume(run_of(folder, streaming=True, told=True, **now))) == 1


def test_a_stream_that_is_counted_otherwise_is_refused(folder: Path) -> None:
    start(run_of(folder, streaming=True))
    with pytest.raises(ConfigError, match=r"data.source: not the text .*\(data.min_length 0 -> 5\)"):
        resume(run_of(folder, streaming=True, min_length=5))


def test_a_blend_in_place_of_one_text_is_refused(folder: Path) -> None:
    start(run_of(folder))
    blend = [{"source": str(folder / f"{name}.jsonl"), "weight": 1.0} for name in "ab"]
    with pytest.raises(MegaliteError) as caught:
        resume(run_of(folder, source=None, blend=blend))
    assert "data.blend[1].source unset -> " in str(caught.value) and caught.value.exit_code == 2


def test_other_validation_text_is_said(folder: Path) -> None:
    write_text(folder / "held.jsonl", tiny_corpus()[:20])
    write_text(folder / "other.jsonl", tiny_corpus()[20:50])
    start(run_of(folder, validation=str(folder / "held.jsonl")))
    told = run_of(folder, validation=str(folder / "other.jsonl"), told=True)
    [note] = resume(told)
    assert "data.validation: from here on its losses are of other text than before (data.validation " in note


def test_another_tokenizer_is_refused(folder: Path) -> None:
    start(run_of(folder, streaming=True))
    other = folder / "other"
    other.mkdir()
    for file in (folder / "tokenizer").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = run_of(folder, streaming=True)
    moved = config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update={"path": str(other)})})
    assert resume(moved) == ()
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + "\n")
    with pytest.raises(
        ConfigError, match=r"tokenizer.path: not the ids of the steps .* weights are of those ids"
    ):
        resume(moved)


def test_a_checkpoint_without_fingerprints_goes_on_and_says_what_it_cannot_compare(folder: Path) -> None:
    start(run_of(folder, streaming=True), data=False)
    assert resume(run_of(folder, streaming=True)) == ()
    [note] = resume(run_of(folder, streaming=True, min_length=5))
    assert "has no fingerprint of its data to compare: data.min_length 0 -> 5" in note


def test_the_fingerprint_is_of_size_order_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in "abc"]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 70_000)
    whole = content_fingerprint(files)
    assert content_fingerprint(files[::-1]) != whole and content_fingerprint(files[:2]) != whole
    renamed = [file.rename(tmp_path / f"{file.name}{file.name}") for file in files]
    assert content_fingerprint(renamed) == whole
    with monkeypatch.context() as patch:
        patch.setattr("megalite.data.files.fingerprint._WHOLE_BYTES", 100_000)
        patch.setattr("megalite.data.files.fingerprint._SAMPLE_BYTES", 1_000)
        sampled = content_fingerprint(renamed)
        for position in (0, 69_999):
            renamed[1].write_bytes(b"\1" * position + b"x" + b"\1" * (69_999 - position))
            assert content_fingerprint(renamed) != sampled
        renamed[1].write_bytes(b"\1" * 70_000)
        assert content_fingerprint(renamed) == sampled
    with pytest.raises(DataError, match="cannot be read"):
        content_fingerprint([tmp_path / "missing"])
