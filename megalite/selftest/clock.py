"""Times of the forward and backward of several implementations, measured in alternating rounds."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.selftest.registry import Form

WARM_UP, ROUNDS, LEAST_ROUNDS, TRIES = 3, 20, 5, 4
HELD_CYCLES, MOST_CYCLES, CYCLES_PER_SECOND = 2_000_000, 40_000_000, 2e9
SECONDS = 4.0
"""After this time no round beyond LEAST_ROUNDS is measured."""


def medians(
    forms: Mapping[str, Form], inputs: Sequence[Tensor], gradients: int, device: torch.device
) -> dict[str, float]:
    """Return the seconds of each form's forward and backward: medians of rounds in which each form runs once."""
    works = {name: _work(form, inputs, gradients) for name, form in forms.items()}
    hosts = {name: host_seconds(work) for name, work in works.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    started = time.monotonic()
    for done in range(ROUNDS):
        if done >= LEAST_ROUNDS and time.monotonic() - started > SECONDS:
            break
        for name, work in works.items():
            seconds[name].append(_seconds(work, device, hosts[name]))
    gc.collect()
    return {name: statistics.median(each) for name, each in seconds.items()}


def _work(form: Form, inputs: Sequence[Tensor], gradients: int) -> Callable[[], Any]:
    leaves = [each.detach().requires_grad_(index < gradients) for index, each in enumerate(inputs)]
    if not gradients:
        return lambda: form(*leaves)
    made = form(*leaves)
    grads = [torch.randn_like(each) for each in ([made] if isinstance(made, Tensor) else made)]

    def both() -> None:
        made = form(*leaves)
        torch.autograd.grad([made] if isinstance(made, Tensor) else [*made], leaves[:gradients], grads)

    return both


def host_seconds(work: Callable[[], Any]) -> float:
    """Call `work` WARM_UP times; return the seconds in which the host launched the last call."""
    for _ in range(WARM_UP):
        started = time.perf_counter()
        work()
    return time.perf_counter() - started


def _seconds(work: Callable[[], Any], device: torch.device, host: float) -> float:
    """Return the seconds of `work`: on the device's own clock, or by the clock on a CPU."""
    if device.type == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    return device_seconds(work, device, host)


def device_seconds(work: Callable[[], Any], device: torch.device, host: float = 0.0) -> float:
    """Return the seconds of `work` on an accelerator, between two events of its queue.

    The device is held until all launches of `work` are queued, as in a step that the device limits; else the time of
    a small shape is that of the host's launches. Where it was not held for long enough, `work` runs again, held twice
    as long, TRIES times in all. host: the seconds that the launches take, about.
    """
    host = max(host, HELD_CYCLES / CYCLES_PER_SECOND / 2)
    for attempt in range(TRIES):
        torch.accelerator.synchronize(device)
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        held = hold(device, host * 2**attempt)
        start.record()
        work()
        end.record()
        begun = start.query()
        end.synchronize()
        if not (held and begun):
            break
    return float(start.elapsed_time(end)) / 1e3


def hold(device: torch.device, host: float = 0.0) -> bool:
    """Queue waiting on a CUDA device, about a millisecond or twice `host` seconds; torch cannot hold other devices.

    Returns whether it is held.
    """
    if device.type != "cuda":
        return False
    torch.cuda._sleep(min(MOST_CYCLES, max(HELD_CYCLES, int(2 * host * CYCLES_PER_SECOND))))
    return True
