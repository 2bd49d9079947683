"""Times on a GPU: the ceilings that copies and products set, and operators as shares of them."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.operators import Form, Operator
from megalite.ops.choice import COMPILED
from megalite.selftest.check import inputs_of
from megalite.selftest.clock import device_seconds, host_seconds

LEAST, SECONDS, LAUNCHED = 10, 0.15, 20
COPIED = 1 << 30  # bytes: many times the largest cache
PRODUCT = 8192


def milliseconds(work: Callable[[], Any]) -> float:
    """The median of a few launches, each between two events of a device that waits until all of it is queued."""
    host = host_seconds(work)
    device = torch.device("cuda")
    first = device_seconds(work, device, host)
    count = max(LEAST, min(200, int(SECONDS / max(first, 1e-6))))
    return statistics.median(device_seconds(work, device, host) for _ in range(count)) * 1e3


def host_microseconds(work: Callable[[], Any]) -> float:
    """The median time in which the host launches `work`."""
    spent = []
    for _ in range(LAUNCHED):
        started = time.perf_counter()
        work()
        spent.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    return statistics.median(spent) * 1e6


def ceilings() -> list[dict[str, Any]]:
    """Measure the chip's peak: memory bandwidth in bytes per second, read plus written; FLOP/s of bf16 products."""
    source = torch.randint(256, (COPIED,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * COPIED / milliseconds(lambda: target.copy_(source)) * 1e3
    # Random numbers, because a product of zeros draws less power and runs faster.
    left, right = (torch.randn(PRODUCT, PRODUCT, device="cuda").bfloat16() for _ in range(2))
    product = 2 * PRODUCT**3 / milliseconds(lambda: left @ right) * 1e3
    return [
        {"ceiling": "copy", "what": f"{COPIED >> 20} MiB to another place", "per_second": copied},
        {"ceiling": "product", "what": f"bf16, {PRODUCT} cubed", "per_second": product},
    ]


def times(operator: Operator, dtype: torch.dtype, copied: float, product: float) -> Iterator[dict[str, Any]]:
    """A row for each direction: our time, the share of the ceiling, and the peers' times. A peer may fail."""
    inputs = inputs_of(operator.entry, operator.timed, dtype, "cuda", seed=0, alike=False)
    peers, gradients = dict(operator.peers), operator.entry.gradients
    if operator.compiled:
        peers["torch.compile"] = torch.compile(operator.entry.plain, dynamic=False)
    size = torch.empty((), dtype=dtype).element_size()
    work, ceiling = (operator.flops, product) if operator.flops else (operator.bytes, copied)
    amounts = work(operator.timed, size) if work else (0.0, 0.0)
    for index, direction in enumerate(operator.directions):
        ours, host = _direction(operator.entry.form(COMPILED), inputs, gradients, direction)
        said: dict[str, Any] = {}
        hosts = {"megalite": host}
        for name, form in peers.items():
            try:
                device_ms, hosts[name] = _direction(form, inputs, gradients, direction)
                said[name] = round(device_ms, 4)
            except Exception as error:  # a backend that this chip, torch or shape does not have
                said[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                    :120
                ]
        rate = amounts[index] / ours * 1e3
        yield {
            "operator": operator.name,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": "x".join(map(str, operator.timed)),
            "direction": direction,
            "ms": round(ours, 4),
            "per_second": rate,
            "unit": "FLOP/s" if operator.flops else "B/s",
            "share": round(rate / ceiling, 3),
            "target": operator.targets[index],
            "peers_ms": said,
            "host_us": {name: round(microseconds) for name, microseconds in hosts.items()},
        }
    gc.collect()
    torch.cuda.empty_cache()


def _direction(form: Form, inputs: list[Tensor], gradients: int, direction: str) -> tuple[float, float]:
    """The device's milliseconds and the host's microseconds of one call."""
    leaves = [each.detach().requires_grad_(index < gradients) for index, each in enumerate(inputs)]

    def forward() -> None:
        with torch.no_grad():
            form(*inputs)

    def both() -> None:
        outputs = _listed(form(*leaves))
        torch.autograd.grad(outputs, leaves[:gradients], [torch.ones_like(each) for each in outputs])

    if direction == "backward":
        outputs = _listed(form(*leaves))
        grads = [torch.randn_like(each) for each in outputs]

        def backward() -> None:
            torch.autograd.grad(outputs, leaves[:gradients], grads, retain_graph=True)

        return milliseconds(backward), host_microseconds(backward)
    work = forward if direction == "forward" else both
    return milliseconds(work), host_microseconds(work)


def _listed(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [*made]
