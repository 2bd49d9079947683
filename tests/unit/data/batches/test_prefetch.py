"""Batches read ahead: the same ones, each once, and nothing that waits at the end."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megalite.config.load import load_run
from megalite.data.batches.blend import BatchRows, BlendedSamples, SampleOrder
from megalite.data.batches.loader import BatchShare, LoadedBatch, StepLoader
from megalite.data.batches.prefetch import Prefetch
from megalite.data.files.token_file import TokenFile, TokenWriter, bin_path, idx_path
from megalite.errors import DataError
from megalite.parallel.mesh import ParallelMesh
from megalite.train.step.state import StepReport, TrainerState
from megalite.train.step.train_step import TrainStep
from megalite.train.validation import held_out_set, validate
from tests.support.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[4]
ENDLESS = 1 << 60


def reader_of(reads: list[int]):
    """Gives what it is asked for, and notes it."""

    def read(samples: int) -> str:
        reads.append(samples)
        return f"batch {samples}"

    return read


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@settings(max_examples=50)
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4),
)
def test_every_step_gets_its_batch_wherever_a_run_resumes(
    workers: int, depth: int, runs: list[tuple[int, int]]
) -> None:
    reads: list[int] = []
    with Prefetch(reader_of(reads), stride=6, end=90, workers=workers, depth=depth) as batches:
        for first, steps in runs:
            for step in range(first, first + steps):
                assert batches.step_batch(6 * step) == f"batch {6 * step}"


@pytest.mark.parametrize(("workers", "depth"), [(1, 1), (1, 3), (3, 3)])
def test_an_undisturbed_run_reads_each_step_once_and_none_beyond_its_end(workers: int, depth: int) -> None:
    reads: list[int] = []
    with Prefetch(reader_of(reads), stride=4, end=40, workers=workers, depth=depth) as batches:
        assert [batches.step_batch(place) for place in range(0, 40, 4)] == [
            f"batch {place}" for place in range(0, 40, 4)
        ]
    assert Counter(reads) == Counter(range(0, 40, 4))


def test_the_steps_to_come_are_read_while_one_computes_and_no_more_than_asked_for() -> None:
    reads: list[int] = []
    with Prefetch(reader_of(reads), stride=1, end=ENDLESS, workers=2, depth=3) as batches:
        batches.step_batch(0)
        wait_until(lambda: sorted(reads) == [0, 1, 2, 3], "nothing was read ahead")
        batches.step_batch(1)
        wait_until(lambda: len(reads) == 5, "nothing was read ahead")
        time.sleep(0.05)
        assert sorted(reads) == [0, 1, 2, 3, 4]


def test_without_workers_a_step_reads_its_own_in_its_own_thread() -> None:
    threads = []
    batches = Prefetch(
        lambda samples: threads.append(threading.current_thread()), stride=1, end=9, workers=0, depth=2
    )
    batches.step_batch(0)
    assert threads == [threading.current_thread()]


def test_what_the_reading_of_a_step_raises_that_step_raises() -> None:
    def read(samples: int) -> int:
        if samples == 2:
            raise DataError("x.bin, sample 2: damaged")
        return samples

    with Prefetch(read, stride=1, end=10, workers=1, depth=2) as batches:
        assert [batches.step_batch(0), batches.step_batch(1)] == [0, 1]
        with pytest.raises(DataError, match=r"^x\.bin, sample 2: damaged$"):
            batches.step_batch(2)
        assert batches.step_batch(3) == 3


def test_closing_waits_for_the_read_under_way_and_begins_no_other() -> None:
    reads: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def read(samples: int) -> int:
        reads.append(samples)
        if samples == 1:
            begun.set()
            assert go_on.wait(PATIENCE)
        return samples

    batches = Prefetch(read, stride=1, end=ENDLESS, workers=1, depth=3)
    batches.step_batch(0)
    assert begun.wait(PATIENCE)
    threading.Timer(0.05, go_on.set).start()
    batches.close()
    assert reads == [0, 1] and not loader_threads()
    batches.close()
    assert batches.step_batch(7) == 7  # who asks later reads for itself


PROGRAM = """
import signal
import time
from megalite.data.batches.prefetch import Prefetch
# Who starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
def read(samples):
    if samples > 2:
        time.sleep(0.2)
    return samples
batches = Prefetch(read, stride=1, end=1 << 60, workers=2, depth=4)
batches.step_batch(0)
print("reading", flush=True)
{}
"""


@pytest.mark.parametrize(
    ("ending", "code", "sent"),
    [
        ("", 0, None),
        ("raise ValueError('a step failed')", 1, None),
        ("time.sleep(600)", -signal.SIGTERM, signal.SIGTERM),
        ("time.sleep(600)", -signal.SIGINT, signal.SIGINT),
    ],
)
def test_no_end_of_a_process_hangs_on_its_reader(ending: str, code: int, sent: signal.Signals | None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(ending)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        if sent is not None:
            process.send_signal(sent)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == code, said


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    prefix = tmp_path_factory.mktemp("prefetch") / "x"
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        writer.add(np.random.default_rng(0).integers(0, 40, 400).astype(np.uint16))
        writer.end_document()
        writer.finish()
        writer.close()
    return TokenFile.open(prefix)


def trainer(file: TokenFile, workers: int, vocab_size: int = 40) -> TrainStep:
    values = {
        "model.vocab_size": vocab_size,
        "model.hidden_size": 16,
        "model.intermediate_size": 24,
        "model.num_hidden_layers": 1,
        "model.num_attention_heads": 2,
        "training.steps": 6,
        "training.precision": "fp32",
        "training.sequence_length": 8,
        "training.micro_batch_size": 4,
        "training.micro_batches": 1,
        "data.source": "x",
        "data.loader_workers": workers,
        "tokenizer.path": "x",
    }
    flags = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    config = load_run(None, flags).config
    loader = StepLoader(file, BatchShare(8, 4, 1), SampleOrder(3))
    return TrainStep(config, ParallelMesh.single(), config.model.shape(vocab_size), loader)


def test_a_run_has_the_same_losses_and_says_what_it_waited(file: TokenFile) -> None:
    runs: list[list[StepReport]] = []
    for workers in (0, 2):
        each = trainer(file, workers)
        with each.batches:
            runs.append([each.train_step() for _ in range(each.total_steps)])
    alone, ahead = runs
    assert [report.loss for report in ahead] == [report.loss for report in alone]
    # The last step reads no batch ahead.
    assert all(0 < report.data_seconds < report.step_seconds for report in alone[:-1] + ahead[:-1])


def test_a_trainer_put_elsewhere_reads_what_belongs_there(file: TokenFile) -> None:
    """As a resume does: what was read ahead for the old position is neither used nor missed."""
    straight, jumping = trainer(file, 0), trainer(file, 1)
    jumping.train_step()
    with straight.batches, jumping.batches:
        for each in (straight, jumping):
            each.state = TrainerState(step=3, samples=12)
        expected, found = (
            each.batches.step_batch(each.state.samples).ready() for each in (straight, jumping)
        )
    assert expected.input_ids.tolist() == found.input_ids.tolist()
    assert found.sample_indices.tolist() == [12, 13, 14, 15]


def loader_of(file: TokenFile, **order: Any) -> StepLoader:
    return StepLoader(file, BatchShare(8, 4, 1), SampleOrder(3, **order))


def test_validation_batches_are_read_ahead_and_give_the_same_loss(file: TokenFile) -> None:
    losses, readers = [], set()
    for workers in (0, 1):
        each = trainer(file, workers)
        held_out = held_out_set(loader_of, file, 11)
        assert held_out.steps == 3
        read = held_out.loader.step_batch

        def noted(samples: int, *, dtype: torch.dtype, read=read) -> LoadedBatch:
            readers.add(threading.current_thread().name.partition("_")[0])
            return read(samples, dtype=dtype)

        held_out.loader.step_batch = noted  # type: ignore[method-assign]
        losses.append(validate(each, {"held": held_out}).loss)
    assert losses[0] == losses[1]
    assert readers == {"MainThread", "loader"} and not loader_threads()


def test_a_step_fails_with_what_its_reader_found(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise DataError("the disk is gone")

    each = trainer(file, 1)
    monkeypatch.setattr(BlendedSamples, "read", damaged)
    with each.batches, pytest.raises(DataError, match="the disk is gone"):
        each.train_step()


def test_a_batch_that_cannot_be_read_ahead_fails_its_own_step(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, read = trainer(file, 0), BlendedSamples.read

    def damaged_behind_4(self: BlendedSamples, places: NDArray[np.int64], pad_id: int) -> BatchRows:
        if places.max() >= 4:
            raise DataError("the disk is gone")
        return read(self, places, pad_id)

    monkeypatch.setattr(BlendedSamples, "read", damaged_behind_4)
    with each.batches:
        assert each.train_step().step == 1
        with pytest.raises(DataError, match="the disk is gone"):
            each.train_step()
    assert each.state.step == 1
