"""What `prepare` writes, that it is the same for any number of workers, and what an accident leaves behind."""

import errno
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from megalite.data.files import partial_files
from megalite.data.files.prepared import prepared_facts
from megalite.data.files.token_file import TokenFile, TokenWriter
from megalite.data.text.corpus import PIECE_CHARACTERS, Corpus
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from megalite.data.tokenizers.tokenizer_training import train_bpe
from megalite.errors import DataError
from megalite.monitor.preparation import PreparationProgress
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.prepared_text import prepare
from tests.support.tiny import tiny_corpus
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[4]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Every kind of source, with an empty document."""
    texts = tiny_corpus()
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(texts))
    (folder / "b.txt").write_text("")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "c.jsonl").write_text(rows)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return Corpus.open([str(folder)])


@pytest.fixture
def long_corpus(tmp_path: Path, corpus: Corpus) -> Corpus:
    """The same with a first document that is cut into pieces, for more than one batch in all."""
    text = "".join(tiny_corpus())
    (tmp_path / "texts" / "a.txt").write_text(text * (5 * PIECE_CHARACTERS // 2 // len(text)))
    return Corpus.open(corpus.sources)


def published(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx", ".json")]


def test_every_document_is_there_and_closed(
    tmp_path: Path, long_corpus: Corpus, tokenizer: Tokenizer
) -> None:
    facts = prepare(long_corpus, tokenizer, tmp_path / "out" / "x")
    file = TokenFile.open(tmp_path / "out" / "x")
    file.check_index()
    texts = tiny_corpus()
    long = (tmp_path / "texts" / "a.txt").read_text()
    assert file.num_documents == facts.documents == 1 + 2 * len(texts)
    for index, text in enumerate([long, *texts, *texts]):
        *ids, last = file.document(index).tolist()
        assert last == tokenizer.end_of_document_id
        assert ids == tokenizer.encode(text)  # of the whole text, also where it was cut into pieces
    assert file.num_tokens == facts.tokens
    assert published(tmp_path / "out") == ["x.bin", "x.idx", "x.json"]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_bytes_do_not_depend_on_the_workers(
    tmp_path: Path, long_corpus: Corpus, tokenizer: Tokenizer, workers: int
) -> None:
    prepare(long_corpus, tokenizer, tmp_path / "here")
    prepare(long_corpus, tokenizer, tmp_path / "there", workers=workers)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_text_that_spells_a_special_token_does_not_end_the_document(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = "before <|endoftext|> after"
    (tmp_path / "a.txt").write_text(text)
    prepare(Corpus.open([str(tmp_path / "a.txt")]), tokenizer, tmp_path / "x")
    *ids, last = TokenFile.open(tmp_path / "x").tokens.tolist()
    assert tokenizer.end_of_document_id not in ids and last == tokenizer.end_of_document_id
    assert tokenizer.decode(ids) == text


def test_a_large_vocabulary_is_written_as_int32(tmp_path: Path) -> None:
    backend = _large_backend()
    save_tokenizer(backend, tmp_path / "tok")
    (tmp_path / "a.txt").write_text("w69999 w3")
    facts = prepare(Corpus.open([str(tmp_path / "a.txt")]), load_tokenizer(tmp_path / "tok"), tmp_path / "x")
    assert facts.dtype == "int32"
    assert TokenFile.open(tmp_path / "x").tokens.tolist() == [69999, 3, 70000]


def _large_backend() -> Backend:
    backend = Backend(models.WordLevel({f"w{index}": index for index in range(70000)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def test_the_same_call_again_does_nothing(tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    calls: list[PreparationProgress] = []
    first = prepare(corpus, tokenizer, tmp_path / "x", progress=calls.append)
    assert calls and calls[-1] == PreparationProgress(
        corpus.size_bytes, corpus.size_bytes, first.documents, first.tokens
    )
    written = (tmp_path / "x.bin").stat().st_mtime_ns
    calls.clear()
    assert prepare(corpus, tokenizer, tmp_path / "x", progress=calls.append) == first
    assert not calls and (tmp_path / "x.bin").stat().st_mtime_ns == written


@pytest.mark.parametrize("change", ["text", "column", "tokenizer", "bin", "idx", "json"])
def test_any_change_prepares_again(tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer, change: str) -> None:
    prefix = tmp_path / "x"
    prepare(corpus, tokenizer, prefix)
    if change == "text":
        (tmp_path / "texts" / "b.txt").write_text("no longer empty")
        corpus = Corpus.open(corpus.sources)
    elif change == "column":
        (tmp_path / "texts" / "c.jsonl").write_text('{"body": "b", "text": "t"}')
        (tmp_path / "texts" / "d.jsonl.gz").unlink()
        prepare(Corpus.open(corpus.sources), tokenizer, prefix)
        corpus = Corpus.open(corpus.sources, text_column="body")
    elif change == "tokenizer":
        save_tokenizer(train_bpe([piece for piece, _ in corpus.pieces()], 300), tmp_path / "other")
        tokenizer = load_tokenizer(tmp_path / "other")
    elif change == "json":
        (tmp_path / "x.json").write_text("{}")
    else:
        (tmp_path / f"x.{change}").write_bytes(b"short")
    calls: list[PreparationProgress] = []
    prepare(corpus, tokenizer, prefix, progress=calls.append)
    assert calls
    TokenFile.open(prefix).check_index()


def test_no_text_at_all_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(
        DataError, match=r"a\.txt has no text \(1 file with 0 bytes, .*\); name a source with text"
    ):
        prepare(Corpus.open([str(tmp_path / "a.txt")]), tokenizer, tmp_path / "out" / "x")
    assert published(tmp_path / "out") == []


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_text_leaves_what_stood_there(
    tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer, workers: int
) -> None:
    prepare(corpus, tokenizer, tmp_path / "out" / "x")
    before = contents(tmp_path / "out" / "x")
    (tmp_path / "texts" / "e.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"e\.txt, line 1: not UTF-8"):
        prepare(Corpus.open(corpus.sources), tokenizer, tmp_path / "out" / "x", workers=workers)
    assert published(tmp_path / "out") == ["x.bin", "x.idx", "x.json"]
    assert contents(tmp_path / "out" / "x") == before


@pytest.mark.parametrize(
    ("method", "number", "why"),
    [
        ("add", errno.ENOSPC, r"No space left on device after \d+ bytes .* removed again; free space"),
        ("finish", errno.ENOSPC, r"No space left on device after \d+ bytes .* removed again; free space"),
        (
            "add",
            errno.EFBIG,
            r"File too large after .* removed again; raise the limit .*ulimit -f unlimited\)$",
        ),
        ("add", errno.EACCES, r"cannot be written \(Permission denied\); check its permissions or"),
        ("add", errno.EIO, r"cannot be written \(Input/output error\); choose another folder \(run\.folder;"),
    ],
)
def test_a_full_disk_cleans_up_and_says_so(
    tmp_path: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    method: str,
    number: int,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(TokenWriter, method, full)
    with pytest.raises(DataError, match=why):
        prepare(corpus, tokenizer, tmp_path / "out" / "x")
    assert published(tmp_path / "out") == []


def test_a_real_full_file_system_cleans_up(tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    script = f"""if True:
        import resource, signal
        from pathlib import Path
        from megalite.data.text.corpus import Corpus
        from tests.support.prepared_text import prepare
        from megalite.data.tokenizers.tokenizer import load_tokenizer
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        corpus = Corpus.open({list(corpus.sources)})
        prepare(corpus, load_tokenizer({str(tokenizer.file)!r}), Path({str(tmp_path)!r}, "x"))
    """
    # -B: Python would cut the bytecode that it caches off at the limit, and never read it again.
    run = subprocess.run([sys.executable, "-B", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "DataError" in run.stderr and "File too large" in run.stderr, run.stderr
    assert published(tmp_path) == ["texts"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.* cannot be written .*choose another folder"):
        prepare(corpus, tokenizer, tmp_path / "file" / "x")


def test_an_interrupt_leaves_nothing(tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    def interrupt(progress: PreparationProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tokenizer, tmp_path / "out" / "x", workers=1, progress=interrupt)
    assert published(tmp_path / "out") == []


def test_a_crash_between_the_renames_is_noticed(
    tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "out" / "x"
    prepare(corpus, tokenizer, prefix)
    (tmp_path / "texts" / "b.txt").write_text("more text")
    rename = Path.replace

    def crash(path: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", crash)
        prepare(Corpus.open(corpus.sources), tokenizer, prefix)
    # New tokens without an index: never the old index, whose lengths would cut them wrongly.
    assert published(tmp_path / "out") == ["x.bin"] and prepared_facts(prefix) is None
    prepare(Corpus.open(corpus.sources), tokenizer, prefix)
    assert published(tmp_path / "out") == ["x.bin", "x.idx", "x.json"]


def test_killed_it_publishes_nothing_and_the_next_run_succeeds(
    tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    out = tmp_path / "out"
    script = f"""if True:
        import time
        from pathlib import Path
        from megalite.data.text.corpus import Corpus
        from tests.support.prepared_text import prepare
        from megalite.data.tokenizers.tokenizer import load_tokenizer
        corpus = Corpus.open({list(corpus.sources)})
        tokenizer = load_tokenizer({str(tokenizer.file)!r})
        prepare(corpus, tokenizer, Path({str(out)!r}, "x"), progress=lambda _: time.sleep(600))
    """
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        wait_until(lambda: published(out), "the other process prepares nothing", process=process)
        time.sleep(0.2)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(corpus, tokenizer, out / "x")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not [name for name in published(out) if not name.startswith(".")]
    prepare(corpus, tokenizer, out / "x")
    assert published(out) == ["x.bin", "x.idx", "x.json"]


def test_a_file_system_without_locks_is_good_enough(
    tmp_path: Path, corpus: Corpus, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert prepare(corpus, tokenizer, tmp_path / "x").documents


@exhibit(
    "Megatron-DeepSpeed#356",
    also=("Megatron-LM#795",),
    subject="data",
    there="nodes that started together built one index at once, and read each other's half of it",
    here="one process writes; who waited for it reads what was published",
    fault=faults.WAITERS_WRITE_INTO_WHAT_IS_PUBLISHED,
)
def test_a_file_published_while_waiting_for_its_lock_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, final = tmp_path / ".x.partial", tmp_path / "x"
    partial.write_bytes(b"whole")
    lock = fcntl.flock

    def published_meanwhile(descriptor: int, operation: int) -> None:
        if partial.exists() and not final.exists():
            partial.replace(final)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", published_meanwhile)
    with partial_files.locked(partial) as file:
        file.write(b"mine")
    assert (final.read_bytes(), partial.read_bytes()) == (b"whole", b"mine")


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = "a pipeline sends the weights, one rank waits for a micro batch.\n"
    peaks = []
    for megabytes in (1, 5):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text(line * (megabytes * 1_000_000 // len(line)))
        script = f"""if True:
            import resource
            from pathlib import Path
            from megalite.data.text.corpus import Corpus
            from tests.support.prepared_text import prepare
            from megalite.data.tokenizers.tokenizer import load_tokenizer
            prepare(Corpus.open([{str(path)!r}]), load_tokenizer({str(tokenizer.file)!r}), Path({str(path)!r} + ".out"))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        """
        run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        peaks.append(int(run.stdout))
    assert peaks[1] - peaks[0] < 12_000, f"{peaks} kB for 1 and 5 MB of text"


def test_preparing_needs_no_torch() -> None:
    modules = ("prepare.prepare", "ensure", "batches.sampler", "batches.packing")
    script = (
        "".join(f"import megalite.data.{name}; " for name in modules)
        + "import sys; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


def test_tiny_shakespeare(tmp_path: Path, shared_data: Path, tokenizer: Tokenizer) -> None:
    source = shared_data / "tinyshakespeare" / "input.txt"
    facts = prepare(Corpus.open([str(source)]), tokenizer, tmp_path / "x", workers=2)
    file = TokenFile.open(tmp_path / "x")
    assert facts.documents == 1
    assert tokenizer.decode(file.tokens[:-1].tolist()) == source.read_text()
