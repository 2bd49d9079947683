"""Generation on the stand-in accelerator: host waits and copies of a decode step, and the tokens of the CPU."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.generation.request import GREEDY, Request, Sampling
from megalite.generation.token_engine import TokenEngine
from megalite.model.adapters import Adapters, add_banks
from megalite.model.kv_cache import CacheSize
from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.device import local_device
from megalite.parallel.host_copies import on_device
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.shape import RopeScaling
from megalite.topology.stages import pipeline_split
from tests.support.standin import count_syncs, refuse_syncs
from tests.support.tiny import tiny_shape

SHAPE = tiny_shape(layers=2)
DYNAMIC = replace(SHAPE, rope_scaling=RopeScaling("dynamic", 4.0), max_position_embeddings=32)
LORAS = {"a": Lora(3, 6.0, ("q_proj", "down_proj")), "b": Lora(2, 4.0, ("q_proj", "o_proj"))}
PENALISED = Sampling(0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
DRAWN = Sampling(1.3, top_k=40, top_p=0.9, min_p=0.01, seed=3)
# Name -> the shape, what each request asks for, and the most copies to the device of a step.
STEPS: dict[str, tuple[Any, list[dict[str, Any]], int]] = {
    "one request": (SHAPE, [{}], 1),
    "greedy": (SHAPE, [{}] * 5, 1),
    "a rotary embedding that follows the length": (DYNAMIC, [{}] * 3, 1),
    "sampled": (SHAPE, [{"sampling": replace(DRAWN, seed=seed)} for seed in range(5)], 2),
    "penalties, log probabilities": (SHAPE, [{"sampling": PENALISED, "logprobs": 3}, {"logprobs": 0}], 2),
    "adapters": (SHAPE, [{"adapter": name} for name in ("a", "b", None, "a")], 2),
    "every kind": (
        SHAPE,
        [
            {"adapter": "a"},
            {"sampling": DRAWN, "adapter": "b", "logprobs": 2},
            {"sampling": PENALISED},
            {"sampling": Sampling(0.0, repetition_penalty=1.5)},
        ],
        3,
    ),
}


class CopiesToDevice(TorchDispatchMode):
    """Counts the operators that take a tensor of the host with more than one element and return one of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        taken = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        host = any(each.device.type == "cpu" and each.dim() > 0 for each in taken)
        returned = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if host and any(each.device.type != "cpu" for each in returned):
            pinned = all(each.is_pinned() for each in taken if each.device.type == "cpu")
            self.count[f"{operator}{'' if pinned else ' from memory that is not pinned'}"] += 1
        return result


def replica_on(shape: Any, device: torch.device) -> tuple[Replica, Adapters]:
    """Return a model with two adapters on a device."""
    mesh = ParallelMesh.single(device)
    replica = build_replica(shape, mesh, pipeline_split(shape.num_hidden_layers), seed=5)
    adapters, linears = add_banks(replica, LORAS)
    generator = torch.Generator().manual_seed(1)
    for linear in (each for name in LORAS for each in linears[name]):
        a, b = (
            torch.randn(mesh.local_shape(each), generator=generator)
            for each in (linear.share.a, linear.share.b)
        )
        linear.fill(a, b)
    return replica, adapters


def requests_of(kind: str) -> list[Request]:
    asked = STEPS[kind][1]
    return [
        Request((3, 5 + at, 7) * (1 + at), 9, **{"sampling": GREEDY, "stop_ids": frozenset(), **settings})
        for at, settings in enumerate(asked)
    ]


def generated(kind: str, on_cpu: bool) -> tuple[list[Any], list[tuple[Counter[str], Counter[str]]]]:
    """Return what all requests of a kind got, and of each decode step the waits and the copies."""
    device = torch.device("cpu") if on_cpu else local_device(0, 1)
    replica, adapters = replica_on(STEPS[kind][0], device)
    engine = TokenEngine(replica, CacheSize(8, 48), adapters=adapters)
    for number, request in enumerate(requests_of(kind)):
        engine.submit(number, request)
    found = list(engine.step())
    counts = []
    while engine.has_work:
        if on_cpu:
            found += engine.step()
            continue
        with count_syncs() as syncs, CopiesToDevice() as copies:
            found += engine.step()
        counts.append(
            (Counter({f"{kind} at {line}": n for (kind, line), n in syncs.lines.items()}), copies.count)
        )
    return found, counts


@pytest.mark.parametrize("kind", STEPS)
def test_a_decode_step_waits_once_and_copies_once_for_each_part(devices, kind: str) -> None:
    [(_, counts)] = devices.run(generated, kind=kind, on_cpu=False)
    assert len(counts) == 8
    for waits, copies in counts:
        assert waits.total() == 1 and "token_engine.py" in next(iter(waits)), waits
        assert copies.total() <= STEPS[kind][2] and not any("not pinned" in each for each in copies), copies


@pytest.mark.parametrize("kind", STEPS)
def test_the_tokens_are_those_of_the_cpu(devices, kind: str) -> None:
    [(found, _)], [(expected, _)] = (devices.run(generated, kind=kind, on_cpu=each) for each in (False, True))
    assert [(each.number, each.token) for each in found] == [(each.number, each.token) for each in expected]


def copied_in_one() -> list[Tensor]:
    device = local_device(0, 1)
    with refuse_syncs(), CopiesToDevice() as copies:
        arrived = on_device(VALUES, device)
    assert copies.count.total() == 1
    assert on_device([], device) == []
    assert all(each.device == device for each in arrived)
    return [each.cpu() for each in arrived]


VALUES = [
    torch.arange(3),
    torch.tensor([[True], [False]]),
    torch.empty(0, dtype=torch.int64),
    torch.tensor([0.5, 0.25], dtype=torch.float64),
    torch.arange(7, dtype=torch.uint8),
    torch.tensor(3.0),
]


def test_values_of_any_type_arrive_in_one_copy(devices) -> None:
    [arrived] = devices.run(copied_in_one)
    for one, other in zip(arrived, VALUES, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert on_device(VALUES, torch.device("cpu")) == VALUES
