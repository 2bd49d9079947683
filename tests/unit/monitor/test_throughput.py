"""Speeds and shares of the peak follow from numbers alone; memory from the process."""

import mmap
from dataclasses import replace

import pytest
import torch

from megalite.monitor import throughput
from megalite.monitor.memory import MemoryUse, device_memory, process_memory
from megalite.monitor.throughput import Throughput
from megalite.topology.flops import flops_per_token
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.parity import about
from tests.support.tiny import FAMILY_SHAPES, tiny_shape


@exhibit(
    "torchtitan PR#2990",
    also=("torchtitan PR#3225",),
    subject="records",
    there="parameters and operations were counted wrongly for a model with a tied head",
    here="the product with the vocabulary counts once, tied or not",
    fault=faults.A_TIED_HEAD_COSTS_NOTHING,
    case="True",
)
@pytest.mark.parametrize("tied", [False, True])
def test_flops_count_every_product_of_a_token(tied: bool) -> None:
    # A layer: query 48x48, key and value 48x24 each, output 48x48; gate, up and down 48x76 each. The head: 101x48.
    matrices = 4 * (2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 76) + 101 * 48
    attention = 4 * 48 * 12
    assert flops_per_token(tiny_shape(tied=tied), 12) == 6 * (matrices + attention)


def test_a_window_has_a_token_see_fewer_keys() -> None:
    """On average 6 of 12 tokens, and with a window of 4, as two of the four layers have, 3.5."""
    shape = replace(FAMILY_SHAPES["gemma2"], sliding_window=4)
    fewer = flops_per_token(replace(shape, sliding_window=None), 12) - flops_per_token(shape, 12)
    assert fewer == 2 * 12 * 48 * (6 - 3.5)


def test_the_speed_is_that_of_the_last_steps_without_the_first() -> None:
    speed = Throughput(peak_flops_per_second=4000.0, window=2)
    assert speed.update(100, 1000, 10.0).tokens_per_second == 10
    assert speed.update(100, 1000, 1.0).tokens_per_second == 100
    assert speed.update(100, 1000, 3.0).tokens_per_second == 50
    last = speed.update(100, 1000, 1.0)
    assert last.tokens_per_second == 50
    assert last.mfu == about(50 * 10 / 4000)


def test_steps_of_other_lengths_have_other_shares() -> None:
    speed = Throughput(peak_flops_per_second=4000.0)
    speed.update(100, 1000, 1.0)
    assert speed.update(100, 1000, 1.0).mfu == about(0.25)
    assert speed.update(50, 3000, 1.0).mfu == about(0.5)


def test_without_a_known_peak_there_is_no_share() -> None:
    assert Throughput(peak_flops_per_second=None).update(1, 10, 1.0).mfu is None


def test_a_peak_that_is_exceeded_is_left_out_from_then_on() -> None:
    """It was measured while the machine was busy."""
    speed = Throughput(peak_flops_per_second=1000.0, window=1)
    assert speed.update(50, 500, 1.0).mfu == about(0.5)
    assert speed.update(100, 1000, 1.0).mfu == about(1.0)
    assert speed.update(154, 1540, 1.0).mfu is None and speed.update(50, 500, 1.0).mfu is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_product_is_the_peak(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    ticks = iter([0, 0, 0.2, 0.2, 0.3, 0.3, 0.9])
    monkeypatch.setattr(throughput, "_PRODUCT_SIZE", 8)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(ticks))
    assert throughput.gemm_flops_per_second(dtype) == about(2 * 8**3 / 0.1)
    assert next(ticks, None) is None, "half a second is enough"


def test_memory_grows_with_what_is_held() -> None:
    before = process_memory()
    with mmap.mmap(-1, 64 << 20) as held:  # a mapping goes back at once, whatever the allocator is set to
        held.write(b"\1" * len(held))
        during = process_memory()
    after = process_memory()
    assert during.now_bytes - after.now_bytes > 48 << 20
    assert after.peak_bytes - before.now_bytes > 48 << 20


def test_a_devices_memory_is_the_allocators_peak_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    counted = {
        "allocated_bytes.all.current": 3,
        "allocated_bytes.all.peak": 7,
        "reserved_bytes.all.peak": 8,
    }
    memory, device = torch.accelerator.memory, torch.device("meta")
    monkeypatch.setattr(memory, "memory_stats", lambda on: calls.append(f"read {on}") or counted)
    monkeypatch.setattr(memory, "reset_peak_memory_stats", lambda on: calls.append(f"reset {on}"))
    assert device_memory(device) == MemoryUse(now_bytes=3, peak_bytes=7, reserved_bytes=8)
    assert calls == ["read meta", "reset meta"]


def test_a_device_without_such_an_allocator_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("Allocator for privateuseone is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator.memory, "memory_stats", refuse)
    assert device_memory(torch.device("meta")) is None
