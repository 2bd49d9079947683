"""A run's own trainer does on the stand-in accelerator what it does on the CPU, and the host hardly waits for it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.folder import read_manifest
from tests.support.device_run import STEPS, resume, train, write_text
from tests.support.selection import cases
from tests.support.tiny_run import ranks_of, write_token_files

# In 16 bits the gradients of shared keys and values depend on who adds them: torch's attention on an accelerator.
SHARED_BY_NONE = {"model.num_key_value_heads": 4}
RUNS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp, bf16": {
        "parallel.tensor": 2,
        "parallel.sequence": "true",
        "training.precision": "bf16",
        **SHARED_BY_NONE,
    },
    "pp, zbv": {"parallel.pipeline": 2, "parallel.schedule": "zbv"},
    "dp and tp, clipped average": {
        "parallel.data": 2,
        "parallel.tensor": 2,
        "optimizer.ema_decay": 0.9,
        "optimizer.gradient_clipping": 0.1,
    },
    "fp16": {"training.precision": "fp16", **SHARED_BY_NONE},
}
# Loss, norm and flags in one copy: the norm decides what the update does.
A_STEP = {"copy to host": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_token_files(folder)
    return folder


def by_kind(lines: Counter[tuple[str, str]]) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for (kind, _), count in lines.items():
        kinds[kind] += count
    return dict(kinds)


@pytest.mark.parametrize("name", cases(RUNS, core=("one rank", "pp, zbv")))
def test_a_run_is_equal_to_the_cpus_to_the_bit(ranks, devices, data, tmp_path, name):
    changes = {"model.kernels": "reference", **RUNS[name]}
    world = ranks_of(changes)
    cpu, device = (tmp_path / each for each in ("cpu", "device"))
    expected = ranks.run(train, world, data=data, changes=changes, into=cpu)
    seen = devices.run(train, world, data=data, changes=changes, into=device)
    for one, other in zip(seen, expected, strict=True):
        assert (one.losses, one.norms, one.validation) == (other.losses, other.norms, other.validation)
    for step in range(1, STEPS + 1):
        ours, theirs = (read_manifest(folder / f"step-{step:06d}") for folder in (device, cpu))
        assert (ours.tensors, ours.files, ours.optimizer) == (theirs.tensors, theirs.files, theirs.optimizer)
    # From the CPU's checkpoint on the device, and from the device's on the CPU.
    resumed = devices.run(resume, world, data=data, changes=changes, from_=cpu)
    assert resumed == ranks.run(resume, world, data=data, changes=changes, from_=device)


@pytest.mark.parametrize("name", cases(RUNS, core=("one rank", "pp, zbv")))
def test_the_host_waits_for_the_device_once_a_step(devices, data, tmp_path, name):
    changes = {"model.kernels": "reference", **RUNS[name]}
    for rank in devices.run(train, ranks_of(changes), data=data, changes=changes, into=tmp_path):
        first, *others, validation = rank.waits
        for step in others:
            assert by_kind(step) == A_STEP, step
        # A pipeline's stages tell each other the shapes of what they will send, once.
        shapes = Counter({place: count for place, count in first.items() if "pipeline.py" in place[1]})
        assert by_kind(first - shapes) == A_STEP, first
        assert by_kind(validation) == {"copy to host": 1}, validation


@pytest.mark.parametrize("name", ["one rank", "pp, zbv"])
def test_tokens_are_those_of_the_cpu(ranks, devices, data, tmp_path, name):
    changes = {"model.kernels": "reference", **RUNS[name]}
    world = ranks_of(changes)
    ranks.run(train, world, data=data, changes=changes, into=tmp_path)
    written = devices.run(write_text, world, data=data, changes=changes, from_=tmp_path)
    assert written == ranks.run(write_text, world, data=data, changes=changes, from_=tmp_path)
