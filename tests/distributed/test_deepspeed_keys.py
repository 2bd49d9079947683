"""Every key that DeepSpeed is handed trains two steps on two ranks, with the losses of the run without the key."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.config.deepspeed.keys import EFFECTS, PassedOn
from megalite.topology.axes import Layout
from tests.support.parity import ZERO_RTOL, about
from tests.support.tiny import tiny_shape
from tests.support.training import Job, build, local_batch

PASSED_ON = {path: effect.kind for path, effect in EFFECTS.items() if isinstance(effect, PassedOn)}
PROBES: dict[str, list[Any]] = {
    "bool": [True, False],
    "count": [0, 100, 5e8],
    "positive": [100, 5e8],
    "fp16 or bf16 or fp32": ["fp32"],
}
# Keys that act on a disk alone; tests/distributed/test_offload_to_disk.py has a run with one.
ON_DISK = ("aio.", "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "nvme_path", "pipeline_")
STEPS = 2


def probes(stage: int) -> Iterator[tuple[str, Any]]:
    for path, kind in PASSED_ON.items():
        if any(part in path for part in ON_DISK) or path.endswith(".device"):
            continue
        if "offload_param" in path and stage < 3:
            continue
        yield from ((path, value) for value in PROBES[kind])


def together(stage: int, place: int) -> dict[str, Any]:
    """One JSON with every key at its first or its last probe."""
    found: dict[str, Any] = {}
    for path, _ in probes(stage):
        kept, _, key = path.rpartition(".")
        table = found
        for block in kept.split(".") if kept else ():
            table = table.setdefault(block, {})
        if not key.startswith("stage3_"):  # the other name of a key that is there
            table[key] = PROBES[PASSED_ON[path]][place]
    return found


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def curve(job: Job) -> list[tuple[float, float]]:
    parts, found = build(job), []
    for step in range(job.steps):
        loss = parts.accumulate(local_batch(job, parts.mesh, step))
        found.append((loss, parts.update(job.learning_rate).grad_norm))
    return found


def curves(job: Job, probed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On one rank: the curve with each JSON, or the error that it ends in; "" is the run without one."""
    found: dict[str, Any] = {"": curve(job)}
    for name, keys in probed.items():
        try:
            found[name] = curve(replace(job, deepspeed_keys=keys))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def assert_the_same(ranks, probed: dict[str, dict[str, Any]], stage: int, **changes: Any) -> None:
    job = Job(tiny_shape(layers=2), Layout(data=2), zero_stage=stage, steps=STEPS, **changes)
    for of_rank in ranks.run(curves, world_size=2, timeout=300, job=job, probed=probed):
        plain = of_rank.pop("")
        wrong = {
            key: found
            for key, found in of_rank.items()
            if found != [about(each, ZERO_RTOL) for each in plain]
        }
        told = "\n".join(f"{key}: {str(found)[:300]}" for key, found in wrong.items())
        assert not wrong, f"without: {plain}\n{told}"
        assert len(of_rank) == len(probed)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_keys_together_train_as_without_them(ranks, stage):
    probed = {"first": together(stage, 0), "last": together(stage, -1)}
    assert_the_same(ranks, probed, stage, dtype=torch.float32)


SETUPS = [
    (1, "none", torch.float32),
    (2, "none", torch.float32),
    (3, "none", torch.float32),
    (1, "optimizer", torch.float32),
    (2, "optimizer", torch.float32),
    (3, "parameters", torch.float32),
    (2, "none", torch.bfloat16),
    (3, "none", torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "offload", "dtype"), SETUPS)
def test_each_key_trains_as_without_it(ranks, stage, offload, dtype):
    probed = {f"{path} = {value}": nested(path, value) for path, value in probes(stage)}
    assert_the_same(ranks, probed, stage, offload=offload, dtype=dtype)
