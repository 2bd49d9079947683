"""Reports of device memory, and the GPU suite's training, on the stand-in."""

from typing import Any

import torch

from benchmarks.gpu.prediction import prediction
from benchmarks.gpu.training import train
from megalite.monitor.memory import MemoryUse, device_memory
from tests.support.parity import BF16_RTOL, assert_close
from tests.support.ranks import RankPool


def memory_of_two_reports() -> list[MemoryUse | None]:
    """Return two reports: after one megabyte was freed and another one kept, and the next report."""
    device = torch.device("standin")
    device_memory(device)
    kept, gone = (torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(2))
    del gone
    found = [device_memory(device), device_memory(device)]
    del kept
    return found


def test_a_report_has_the_allocators_peak_since_the_one_before(devices: RankPool) -> None:
    [(first, second)] = devices.run(memory_of_two_reports, world_size=1)
    assert first.peak_bytes - first.now_bytes == 1 << 20 and first.reserved_bytes >= first.peak_bytes
    assert second.peak_bytes == second.now_bytes == first.now_bytes


def trained(device: str) -> dict[str, Any]:
    return train("reference", device=device, product=None, tiny=True)


def test_the_gpu_suites_training_runs_on_a_device(devices: RankPool) -> None:
    [on_device] = devices.run(trained, world_size=1, device="standin")
    [on_cpu] = devices.run(trained, world_size=1, device="cpu")
    assert on_device["first_loss"] == on_cpu["first_loss"]  # the update has a compiled form on the CPU alone
    assert_close(on_device["last_loss"], on_cpu["last_loss"], rtol=BF16_RTOL, what="the last loss")
    [whole, longest, *_] = on_device["profile"]
    assert (
        whole["kernel"] == "all"
        and whole["ms"] >= longest["ms"] > 0
        and whole["launches"] > longest["launches"]
    )
    assert on_device["mfu"] is None and on_device["peak_memory_gib"] is not None


def predicted() -> list[dict[str, Any]]:
    return list(prediction("standin", ("Llama, plain torch", "Llama, LoRA"), tiny=True))


def test_the_planner_is_compared_with_a_devices_allocator(devices: RankPool) -> None:
    [rows] = devices.run(predicted, world_size=1)
    for row in rows:
        assert row["reserved_bytes"] >= row["peak_bytes"] > row["before_bytes"] and "no_time" in row
        assert abs(row["predicted_bytes"] / row["peak_bytes"] - 1) < 0.2
