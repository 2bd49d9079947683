"""Whether gradients are finite is noted in one pass a tensor, for whole gradients and for flat ranges of them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.model.replica import Replica
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.stages import pipeline_split
from megalite.train.optimizer.nonfinite import FiniteFlags
from tests.support import reported_faults as faults
from tests.support.museum import exhibit
from tests.support.tiny import tiny_shape


def flags_of_tiny_model() -> tuple[FiniteFlags, Parameter, Tensor]:
    """Return the flags, a parameter of three canonical tensors, and a finite gradient of it."""
    replica: Replica = build_replica(tiny_shape(layers=2), ParallelMesh.single(), pipeline_split(2), seed=1)
    [parameter] = [each for each in replica.trained if each.layer == 1 and len(each.spec.parts) == 3]
    return (
        FiniteFlags(replica.trained, replica.mesh),
        parameter,
        torch.ones_like(replica.tensors[parameter.name]),
    )


class Launches(TorchDispatchMode):
    """Counts the operators that compute: views launch nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_gradient_is_seen_by_one_launch_a_tensor() -> None:
    flags, parameter, gradient = flags_of_tiny_model()
    flags.see(parameter, gradient)  # allocates once
    with Launches() as launches:
        flags.see(parameter, gradient)
    assert launches.names == ["aten.aminmax.out"] * 3


@exhibit(
    "Chinese-LLaMA-Alpaca#534",
    subject="optimizer",
    there="nothing said which tensor overflowed until the loss scale was used up",
    here="the tensor is named, also where a later micro batch was finite",
    fault=faults.EARLIER_OVERFLOWS_ARE_FORGOTTEN,
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensor_is_named_after_a_later_finite_backward(
    value: float, part: int, dtype: torch.dtype
) -> None:
    flags, parameter, finite = flags_of_tiny_model()
    finite = finite.to(dtype)
    gradient, rows = finite.clone(), ParallelMesh.single().rows(parameter)
    gradient[sum(rows[: part + 1]) - 1, -1] = value
    name = f"{parameter.spec.parts[part].name} (layer 1)"
    flags.see(parameter, gradient)
    flags.backward_ends()
    flags.see(parameter, finite)
    assert flags.first_nonfinite() == name
    flags.clear()
    flags.see(parameter, finite)
    assert flags.first_nonfinite() is None


def test_a_flat_range_is_seen_in_the_tensors_that_it_crosses() -> None:
    flags, parameter, gradient = flags_of_tiny_model()
    query, key, _ = (rows * gradient.shape[1] for rows in ParallelMesh.single().rows(parameter))
    flat = gradient.flatten()
    flat[query + key - 1] = torch.inf
    names = {}
    for start, end in ((0, query + key - 1), (query - 5, query + key), (query + key, len(flat))):
        flags.see(parameter, flat[start:end], start)
        names[start] = flags.first_nonfinite()
        flags.clear()
    assert names == {0: None, query - 5: f"{parameter.spec.parts[1].name} (layer 1)", query + key: None}
