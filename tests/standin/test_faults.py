"""Planted faults: what a GPU would refuse or get wrong in silence turns a run on the stand-in accelerator red."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megalite.checkpoint.staging import Staging
from megalite.data.batches.transfer import ArrivingBatch, BatchTransfer
from megalite.model.kv_cache import CachedStep
from megalite.parallel import pipeline
from megalite.train.checkpoints.saving import RunSaver
from megalite.train.step import train_step
from tests.support.device_run import Seen, train, write_text
from tests.support.ranks import RankFailed
from tests.support.tiny_run import ranks_of, write_token_files
from tests.support.waiting import PATIENCE

CHANGES = {"model.kernels": "reference"}
TWO = {**CHANGES, "parallel.data": 2}


@dataclass(frozen=True)
class Fault:
    """`target.attribute` becomes `replace(itself)`; the message of what the run then fails by."""

    target: Any
    attribute: str
    replace: Callable[[Any], Any]
    message: str
    changes: dict[str, Any]
    job: Callable[..., Any] = train


def _instead(other: Any) -> Callable[[Any], Any]:
    return lambda _: other


def _stay(self: BatchTransfer, batch: Any) -> ArrivingBatch:
    return ArrivingBatch(batch)


def _weigh_on_the_host(weight: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *batch: weight(*batch).cpu()


def _start_too_early(start: Callable[..., Any]) -> Callable[..., Any]:
    """Reuses the pinned buffer for the next batch before the copy ran."""

    def start_and_reuse(self: BatchTransfer, batch: Any) -> ArrivingBatch:
        arriving = start(self, batch)
        if arriving.on_host is not None:
            arriving.on_host.map(lambda tensor: tensor.fill_(1))
        return arriving

    return start_and_reuse


def train_with_a_slow_writer(**arguments: Any) -> Seen:
    """The thread that writes a checkpoint looks at its copy when the update of the next step is on its way."""
    begin, wait, stepped, finish = Staging.begin, Staging.wait_for_device, RunSaver.stepped, RunSaver.finish
    updated = threading.Event()

    def begin_anew(self: Staging, *tensors: Any) -> Any:
        updated.clear()
        return begin(self, *tensors)

    def wait_late(self: Staging) -> None:
        updated.wait(PATIENCE)
        wait(self)

    def after_update(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            updated.set()
            return original(*arguments)

        return called

    with (
        mock.patch.object(Staging, "begin", begin_anew),
        mock.patch.object(Staging, "wait_for_device", wait_late),
        mock.patch.object(RunSaver, "stepped", after_update(stepped)),
        mock.patch.object(RunSaver, "finish", after_update(finish)),
    ):
        try:
            return train(**arguments)
        finally:
            updated.set()


def _keep_on_the_host(extend: Callable[..., Any]) -> Callable[..., Any]:
    def extend_there(self: CachedStep, layer: int, key: Tensor, value: Tensor, window: int | None) -> Any:
        return [each.cpu() for each in extend(self, layer, key, value, window)]

    return extend_there


NO_WAIT = "no wait|out of range|not finite|is nan"
FAULTS = {
    "the batch stays on the CPU": Fault(BatchTransfer, "start", _instead(_stay), "same device", CHANGES),
    "a CPU tensor in a collective": Fault(
        train_step, "weight_share", _weigh_on_the_host, "device type cpu", TWO
    ),
    "the step does not wait for its batch": Fault(
        ArrivingBatch, "ready", _instead(lambda self: self.batch), NO_WAIT, CHANGES
    ),
    "the batch's memory is not recorded": Fault(
        Tensor, "record_stream", _instead(lambda *_: None), "no record_stream", CHANGES
    ),
    "the update does not wait for the checkpoint's copy": Fault(
        Staging,
        "hold_update",
        _instead(lambda self: None),
        "may still read them: no wait",
        CHANGES,
        train_with_a_slow_writer,
    ),
    "the cache lies on the CPU": Fault(
        CachedStep, "extend_decoded", _keep_on_the_host, "same device", CHANGES, write_text
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    fault = FAULTS[name]
    replaced = fault.replace(getattr(fault.target, fault.attribute))
    with mock.patch.object(fault.target, fault.attribute, replaced):
        yield


def with_fault(name: str, **arguments: Any) -> Any:
    with planted(name):
        return FAULTS[name].job(**arguments)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    return folder


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_ends_the_run(devices, data, tmp_path, name):
    fault = FAULTS[name]
    arguments: dict[str, Any] = {"data": data, "changes": fault.changes}
    if fault.job is write_text:
        devices.run(train, ranks_of(fault.changes), **arguments, into=tmp_path)
        arguments["from_"] = tmp_path
    else:
        arguments["into"] = tmp_path
    with pytest.raises(RankFailed, match=fault.message):
        devices.run(with_fault, ranks_of(fault.changes), name=name, **arguments)


def test_a_slow_writer_is_no_fault(devices, data, tmp_path):
    [seen] = devices.run(train_with_a_slow_writer, data=data, changes=CHANGES, into=tmp_path / "slow")
    [usual] = devices.run(train, data=data, changes=CHANGES, into=tmp_path / "usual")
    assert (seen.losses, seen.validation) == (usual.losses, usual.validation)


def train_on_reused_memory(**arguments: Any) -> Seen:
    with mock.patch.object(BatchTransfer, "start", _start_too_early(BatchTransfer.start)):
        return train(**arguments)


def test_pinned_memory_that_is_written_before_its_copy_ran_gives_other_losses(devices, data, tmp_path):
    [seen] = devices.run(train_on_reused_memory, data=data, changes=CHANGES, into=tmp_path / "reused")
    [usual] = devices.run(train, data=data, changes=CHANGES, into=tmp_path / "usual")
    assert all(one != other for one, other in zip(seen.losses, usual.losses, strict=True))


def wait_in_the_step(**arguments: Any) -> Seen:
    total = pipeline._total

    def waiting_total(*inputs: Any) -> Tensor:
        summed = total(*inputs)
        assert summed.item() == summed.item()
        return summed

    with mock.patch.object(pipeline, "_total", waiting_total):
        return train(**arguments)


def test_an_item_in_the_step_is_counted_with_its_line(devices, data, tmp_path):
    [seen] = devices.run(wait_in_the_step, data=data, changes=CHANGES, into=tmp_path)
    for step in seen.waits[:-1]:
        assert (
            sum(count for (kind, line), count in step.items() if kind == "item" and "pipeline.py" in line)
            == 2
        )
