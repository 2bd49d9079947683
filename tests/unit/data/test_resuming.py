"""A preparation that was killed goes on where it stopped, and its files are those of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.data.files.token_file import TokenFile
from megalite.data.files.workers import WorkerDied
from megalite.data.prepare import encoded_batches as batches_module
from megalite.data.prepare import prepare as prepare_module
from megalite.data.prepare.encoded_batches import _EncodeText
from megalite.data.prepare.prepare import Preparation, prepare_outputs
from megalite.data.prepare.split import Split
from megalite.data.text.corpus import Corpus
from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.monitor.preparation import PreparationProgress
from tests.support.tiny import tiny_corpus

ROOT = Path(__file__).parents[3]
SPLIT = Split((0.6, 0.2, 0.2), 3)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "_BATCH_CHARACTERS", 400)
    monkeypatch.setattr(prepare_module, "_JOURNAL_BATCHES", 1)
    monkeypatch.setattr("megalite.data.text.corpus.PIECE_CHARACTERS", 300)
    monkeypatch.setattr("megalite.data.text.corpus.cut_document.__defaults__", (300,))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """A document in many pieces between short ones, in three files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    rows = "".join(json.dumps({"text": text}) + "\n" for text in [*tiny_corpus(), "short", ""])
    (folder / "a.jsonl").write_text(rows)
    (folder / "b.txt").write_text("".join(tiny_corpus()))
    (folder / "c.jsonl").write_text(rows)
    return Corpus.open([str(folder)])


@pytest.fixture(params=["whole", "split", "min_length"])
def preparation(
    request: pytest.FixtureRequest, corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> Preparation:
    whole = Preparation(corpus, tokenizer, (tmp_path / "out" / "x",))
    names = tuple(tmp_path / "out" / f"x-{part}" for part in ("train", "validation", "test"))
    return {
        "whole": whole,
        "split": replace(whole, outputs=names, split=SPLIT, min_length=30),
        "min_length": replace(whole, min_length=120),  # more than a batch may hold
    }[request.param]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry a batch that is encoded."""
    calls: list[int] = []
    encode = _EncodeText.__call__

    def counted(self: _EncodeText, batch: Any) -> Any:
        calls.append(len(batch[0]))
        return encode(self, batch)

    monkeypatch.setattr(_EncodeText, "__call__", counted)
    yield calls


def elsewhere(preparation: Preparation, folder: Path) -> Preparation:
    return replace(preparation, outputs=tuple(folder / prefix.name for prefix in preparation.outputs))


def contents(preparation: Preparation) -> dict[str, bytes]:
    folder = preparation.outputs[0].parent
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stopped_after(preparation: Preparation, batches: int) -> None:
    seen = 0

    def interrupt(progress: PreparationProgress) -> None:
        nonlocal seen
        seen += 1
        if seen == batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_outputs(preparation, progress=interrupt)


def test_interrupted_anywhere_it_goes_on(
    preparation: Preparation, tmp_path: Path, encoded: list[int]
) -> None:
    undisturbed = elsewhere(preparation, tmp_path / "undisturbed")
    prepare_outputs(undisturbed)
    total = len(encoded)
    assert total > 15
    for batches in range(1, total + 1, 5):
        stopped = elsewhere(preparation, tmp_path / f"stopped-{batches}")
        encoded.clear()
        stopped_after(stopped, batches)
        first = len(encoded)
        encoded.clear()
        facts = prepare_outputs(stopped)
        # Only what was undecided for being short is encoded again: three batches at most.
        assert first == batches and len(encoded) <= total - batches + (3 if preparation.min_length else 0)
        assert contents(stopped) == contents(undisturbed)
        assert facts == stopped.done()


@pytest.mark.parametrize("change", ["chmod", "hard link", "move", "overwrite"])
def test_the_content_of_the_text_keeps_what_was_done(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path, encoded: list[int], change: str
) -> None:
    """Overwritten text has its old size and time of the last write."""
    preparation = Preparation(corpus, tokenizer, (tmp_path / "out" / "x",))
    stopped_after(preparation, 8)
    file = tmp_path / "texts" / "a.jsonl"
    about, sources = file.stat(), corpus.sources
    if change == "chmod":
        file.chmod(0o600)
    elif change == "hard link":
        (tmp_path / "link").hardlink_to(file)
    elif change == "move":
        file.parent.rename(tmp_path / "moved")
        sources = (str(tmp_path / "moved"),)
    else:
        file.write_bytes(file.read_bytes().replace(b"the", b"The"))
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    changed = replace(preparation, corpus=Corpus.open(sources))
    assert changed.fingerprint != preparation.fingerprint
    undisturbed = elsewhere(changed, tmp_path / "undisturbed")
    encoded.clear()
    prepare_outputs(undisturbed)
    total = len(encoded)
    encoded.clear()
    prepare_outputs(changed)
    assert len(encoded) == total - (0 if change == "overwrite" else 8)
    assert {name: data for name, data in contents(changed).items() if not name.endswith(".json")} == {
        name: data for name, data in contents(undisturbed).items() if not name.endswith(".json")
    }


@pytest.mark.extended
def test_interrupted_again_and_again(preparation: Preparation, tmp_path: Path, encoded: list[int]) -> None:
    undisturbed = elsewhere(preparation, tmp_path / "undisturbed")
    prepare_outputs(undisturbed)
    total = len(encoded)
    times = 0
    while preparation.done() is None and times < 2 * total:
        times += 1
        try:
            stopped_after(preparation, 4)
        except pytest.fail.Exception:  # it was through before the fourth batch
            break
    assert times > total // 5
    assert contents(preparation) == contents(undisturbed)


@pytest.mark.extended
def test_killed_with_workers_it_goes_on(preparation: Preparation, tmp_path: Path, encoded: list[int]) -> None:
    undisturbed = elsewhere(preparation, tmp_path / "undisturbed")
    prepare_outputs(undisturbed)
    total = len(encoded)
    script = f"""if True:
        import os, signal
        from pathlib import Path, PosixPath
        import megalite.data.prepare.encoded_batches as batches
        import megalite.data.prepare.prepare as module
        from megalite.data.text.corpus import Corpus, cut_document
        from megalite.data.prepare.prepare import Preparation, prepare_outputs
        from megalite.data.prepare.split import Split
        from megalite.data.tokenizers.tokenizer import load_tokenizer

        def killed(progress, seen=[]):
            seen.append(progress)
            if len(seen) == 9:
                os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            batches._BATCH_CHARACTERS, module._JOURNAL_BATCHES, cut_document.__defaults__ = 400, 1, (300,)
            preparation = Preparation(
                Corpus.open({list(preparation.corpus.sources)}),
                load_tokenizer({str(preparation.tokenizer.file)!r}),
                {preparation.outputs},
                {preparation.min_length},
                {preparation.split},
            )
            prepare_outputs(preparation, workers=2, progress=killed)
    """
    path = tmp_path / "script.py"
    path.write_text(script)
    run = subprocess.run([sys.executable, path], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == -signal.SIGKILL
    encoded.clear()
    prepare_outputs(preparation)
    assert 0 < len(encoded) <= total - 5
    assert contents(preparation) == contents(undisturbed)


@pytest.mark.parametrize("change", ["text", "journal", "bin", "lengths", "another output"])
def test_what_no_longer_fits_is_started_over(
    preparation: Preparation, tmp_path: Path, encoded: list[int], change: str
) -> None:
    stopped_after(preparation, 8)
    first = preparation.outputs[0]
    if change == "text":
        (tmp_path / "texts" / "d.txt").write_text("more")
        preparation = replace(preparation, corpus=Corpus.open(preparation.corpus.sources))
    elif change == "journal":
        first.with_name(f".{first.name}.journal").write_text("[")
    elif change == "another output":
        (tmp_path / "out").rename(tmp_path / "moved")
        preparation = elsewhere(preparation, tmp_path / "moved")
    else:
        path = first.with_name(f".{first.name}.{change}.partial")
        path.write_bytes(path.read_bytes()[:-1])
    undisturbed = elsewhere(preparation, tmp_path / "undisturbed")
    prepare_outputs(undisturbed)
    encoded.clear()
    prepare_outputs(preparation)
    assert contents(preparation) == contents(undisturbed)
    for prefix in preparation.outputs:
        TokenFile.open(prefix).check_index()


def test_a_killed_worker_loses_nothing(preparation: Preparation, tmp_path: Path) -> None:
    undisturbed = elsewhere(preparation, tmp_path / "undisturbed")
    prepare_outputs(undisturbed)

    def died(progress: PreparationProgress) -> None:
        if 2 * progress.bytes_read > progress.bytes_total:
            raise WorkerDied("a worker process died")

    with pytest.raises(WorkerDied):
        prepare_outputs(preparation, progress=died)
    assert [path for path in preparation.outputs[0].parent.iterdir() if path.suffix == ".journal"]
    prepare_outputs(preparation)
    assert contents(preparation) == contents(undisturbed)
