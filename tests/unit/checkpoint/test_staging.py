"""Host memory that CUDA locks: a stand-in for the driver counts what is locked."""

import gc
from unittest import mock

import pytest
import torch

from megalite.checkpoint.staging import HostBuffer

CUDA = torch.device("cuda", 0)


class Driver:
    """cudaHostRegister and cudaHostUnregister, with what they were given."""

    def __init__(self, refuses: bool = False):
        self.refuses, self.locked = refuses, set[int]()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert address not in self.locked and size_bytes > 0 and flags == 0
        if not self.refuses:
            self.locked.add(address)
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_it_is_locked_as_long_as_it_lives(driver: Driver) -> None:
    buffer = HostBuffer()
    buffer.reserve(100, CUDA)
    assert driver.locked == {buffer.bytes.data_ptr()}
    first = buffer.bytes
    buffer.reserve(50, CUDA)
    assert buffer.bytes is first
    buffer.reserve(1000, CUDA)
    assert driver.locked == {buffer.bytes.data_ptr()} and buffer.bytes.nbytes == 1000
    del buffer, first
    gc.collect()
    assert not driver.locked


def test_a_refused_lock_leaves_memory_to_copy_to_and_no_error_behind(driver: Driver) -> None:
    driver.refuses = True
    launched = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    buffer = HostBuffer()
    with mock.patch.object(torch, "ones", launched):
        buffer.reserve(100, CUDA)
    launched.assert_called_once_with(1, device=CUDA)
    assert buffer.bytes.nbytes == 100 and not driver.locked
    del buffer
    gc.collect()


def test_without_a_device_nothing_is_locked(driver: Driver) -> None:
    buffer = HostBuffer()
    buffer.reserve(100, None)
    assert buffer.bytes.nbytes == 100 and not driver.locked
    buffer.reserve(100, CUDA)
    assert driver.locked == {buffer.bytes.data_ptr()}
