"""Inputs that rank 0 prepares while the others wait, and that every host must see alike."""

import socket
import threading
from pathlib import Path

import pytest

from megalite.config.load import load_run
from megalite.data.batches.stream_files import StreamFile
from megalite.data.ensure import RunData
from megalite.launcher.control.connection import RendezvousLimits
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.member import JobEnded, Member
from megalite.launcher.control.messages import Hello
from megalite.launcher.control.rank_states import CoordinatedJob
from megalite.launcher.control.rendezvous import Meeting
from megalite.train import shared_inputs
from megalite.train.inputs import RunInputs
from megalite.train.run_folder import RunFolder
from megalite.train.shared_inputs import agreed_inputs

LENGTHS = ["--training.sequence_length", "32", "--training.steps", "1"]
BATCH = ["--training.global_batch_size", "2", "--training.micro_batch_size", "1"]
CONFIG = load_run(None, ["--data.source", "stdlib", "--model.preset", "tiny", *LENGTHS, *BATCH]).config


def inputs(folder: Path) -> RunInputs:
    for name, size in (("train.bin", 200_000), ("train.idx", 34), ("streamed.jsonl", 200_000)):
        (folder / name).write_bytes(bytes(size))
    streamed = (StreamFile(folder / "streamed.jsonl", 200_000),)
    return RunInputs(RunData(None, (folder / "train",), (1.0,), notes=("a note",), stream=streamed), None)


@pytest.fixture
def agree(monkeypatch):
    """Run `agreed_inputs` on rank 0 and 1, of two hosts, with a folder each; return their results or errors."""
    monkeypatch.setattr(shared_inputs, "_SHARED_SECONDS", 0.1)
    coordinator = Coordinator(socket.create_server(("127.0.0.1", 0)), CoordinatedJob(2), say=print)
    coordinator.start()
    results: dict[int, object] = {}

    def run(rank: int, folder: Path) -> None:
        member = Member.join(
            lambda: (*coordinator.address, ""), Hello(rank, 2, f"n{rank}", 1), RendezvousLimits(5)
        )
        try:
            met = Meeting(member, None, "127.0.0.1", "")
            results[rank] = agreed_inputs(met, CONFIG, RunFolder(folder), leads_node=True)
        except JobEnded as error:
            results[rank] = error
        member.leave()

    def together(*folders: Path) -> dict[int, object]:
        threads = [threading.Thread(target=run, args=each) for each in enumerate(folders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    yield together
    coordinator.stop()
    assert coordinator.join(5)


def test_the_inputs_of_rank_0_reach_all_ranks(agree, monkeypatch, tmp_path):
    made = inputs(tmp_path)
    monkeypatch.setattr(shared_inputs, "prepare_inputs", lambda *_: made)
    assert agree(tmp_path, tmp_path) == {0: made, 1: made}


def test_a_run_folder_that_is_not_shared_is_named(agree, monkeypatch, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    monkeypatch.setattr(shared_inputs, "prepare_inputs", lambda *_: inputs(one))
    told = agree(one, two)
    line = f"run.folder: the folder of rank 0 on n0 (rank 0), another folder ({two}) on n1 (rank 1)"
    assert [line in str(each) for each in told.values()] == [True, True]
    assert "put the run folder, the data and the weights on a file system that all of them share" in str(
        told[1]
    )


@pytest.mark.parametrize(
    ("damage", "seen"),
    [
        (lambda file: file.unlink(), "missing ({file})"),
        (lambda file: file.write_bytes(bytes(199_999)), "199999 bytes"),
        (lambda file: file.write_bytes(bytes(199_999) + b"1"), "200000 bytes"),
    ],
    ids=["missing", "short", "other content"],
)
@pytest.mark.parametrize("name", ["train.bin", "streamed.jsonl"])
def test_a_file_that_differs_is_named_with_both_hosts(agree, monkeypatch, tmp_path, damage, seen, name):
    made, whole = inputs(tmp_path), shared_inputs._fingerprint
    changed = tmp_path / name
    before = whole(changed)

    def of_host(path: Path) -> str:
        # The thread of rank 1 stands for a host with another file at the same path.
        return whole(path) if path != changed or len(asked) else (asked.append(path) or before)

    asked: list[Path] = []
    monkeypatch.setattr(shared_inputs, "prepare_inputs", lambda *_: made)
    monkeypatch.setattr(shared_inputs, "_fingerprint", of_host)
    damage(changed)
    text = str(agree(tmp_path, tmp_path)[0])
    assert f"{changed}: " in text
    assert before in text and seen.format(file=changed) in text
