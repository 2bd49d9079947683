"""A backward that leaves weight gradients for later gives the same gradients and computes nothing twice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.model.norms import Norm
from megalite.model.options import ModelOptions
from megalite.parallel.gradient_sums import WeightGradients, deferred_weight_gradients
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.stages import balanced_split
from tests.support.parity import assert_close

HIDDEN, FEATURES, SEQUENCES, LENGTH = 12, 20, 3, 8


class Block(nn.Module):
    """x + down(tanh(up(norm(x)))), with biases."""

    def __init__(self, mesh: ParallelMesh, *, deferrable: bool):
        super().__init__()
        common: dict[str, Any] = {"mesh": mesh, "dtype": torch.float64, "bias": True}
        common["gradients"] = WeightGradients(deferrable=deferrable)
        self.norm = Norm(HIDDEN, 1e-5, ModelOptions(torch.float64))
        self.up = ColumnParallelLinear(HIDDEN, mesh.local(FEATURES), **common)
        self.down = RowParallelLinear(mesh.local(FEATURES), HIDDEN, **common)
        held = balanced_split(FEATURES, mesh.tp.size)[mesh.tp.rank]
        with torch.no_grad():
            self.norm.weight.copy_(_values(HIDDEN, seed=5))
            self.up.weight.copy_(_values(FEATURES, HIDDEN, seed=1)[held.start : held.stop])
            self.up.bias.copy_(_values(FEATURES, seed=6)[held.start : held.stop])
            self.down.weight.copy_(_values(HIDDEN, FEATURES, seed=2)[:, held.start : held.stop])
            self.down.bias.copy_(_values(HIDDEN, seed=7))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(hidden_states)))).add_(hidden_states)


class Counter(TorchDispatchMode):
    """Counts collectives, and products by the shape of what they give; notes the shapes of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.products: list[tuple[int, ...]] = []
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d":
            self.collectives.append(name)
        elif isinstance(result, Tensor):
            if name in ("mm", "addmm", "bmm", "matmul"):
                self.products.append(tuple(result.shape))
            if func._schema.returns[0].alias_info is None:  # a view computes nothing
                self.shapes.add(tuple(result.shape))
        return result


@dataclass
class Seen:
    """One rank's gradients, and what each pass of the backward did."""

    gradients: dict[str, Tensor]
    collectives: list[list[str]] = field(default_factory=list)
    products: list[list[tuple[int, ...]]] = field(default_factory=list)
    weight_shaped_in_first_pass: bool = False


def _values(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _prepared(sequence_parallel: bool, *, deferrable: bool = False) -> tuple[Block, Tensor, Tensor]:
    """The block, its input and the gradient of its output, of this rank's positions."""
    mesh = ParallelMesh.over_world(Layout(tensor=2), sequence_parallel=sequence_parallel)
    here = mesh.sequence_range(LENGTH)
    inputs, grad = (
        _values(SEQUENCES, LENGTH, HIDDEN, seed=seed)[:, here.start : here.stop].clone() for seed in (3, 4)
    )
    return Block(mesh, deferrable=deferrable), inputs.requires_grad_(), grad


def _gradients(block: Block, inputs: Tensor) -> dict[str, Tensor]:
    return {"inputs": inputs.grad, **{name: each.grad for name, each in block.named_parameters()}}


def in_one_pass_on_rank(sequence_parallel: bool) -> Seen:
    block, inputs, grad = _prepared(sequence_parallel)
    output = block(inputs)
    with Counter() as counter:
        output.backward(grad)
    return Seen(_gradients(block, inputs), [counter.collectives], [counter.products])


def in_two_passes_on_rank(sequence_parallel: bool) -> Seen:
    """As a schedule that splits the backward runs it."""
    block, inputs, grad = _prepared(sequence_parallel, deferrable=True)
    output = block(inputs)
    with Counter() as first, deferred_weight_gradients() as deferred:
        output.backward(grad)
    with Counter() as second:
        for compute in deferred:
            compute()
    weights = {tuple(each.shape) for each in block.parameters() if each.dim() == 2}
    counters = (first, second)
    return Seen(
        _gradients(block, inputs),
        [counter.collectives for counter in counters],
        [counter.products for counter in counters],
        weight_shaped_in_first_pass=bool(weights & first.shapes),
    )


# The communication of the two linears and the residual in a backward.
COLLECTIVES = {False: ["allreduce_"], True: ["_allgather_base_", "_reduce_scatter_base_"]}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_both_forms_give_the_same_gradients(ranks, sequence_parallel):
    def run(function: Callable[..., Seen]) -> list[Seen]:
        return ranks.run(function, world_size=2, sequence_parallel=sequence_parallel)

    for one, two in zip(run(in_one_pass_on_rank), run(in_two_passes_on_rank), strict=True):
        assert one.gradients.keys() == two.gradients.keys()
        for name, gradient in one.gradients.items():
            assert_close(two.gradients[name], gradient, what=name)
        # The shard of the input is gathered again, rather than kept whole, where that overlaps with a product.
        again = ["_allgather_base_"] if sequence_parallel else []
        assert sorted(one.collectives[0]) == sorted(COLLECTIVES[sequence_parallel] + again)
        assert len(one.products[0]) == 4


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_a_split_backward_does_nothing_twice(ranks, sequence_parallel):
    tokens = SEQUENCES * LENGTH
    for seen in ranks.run(in_two_passes_on_rank, world_size=2, sequence_parallel=sequence_parallel):
        assert not seen.weight_shaped_in_first_pass
        assert sorted(seen.products[0]) == [(tokens, FEATURES // 2), (tokens, HIDDEN)]
        assert sorted(seen.products[1]) == [(FEATURES // 2, HIDDEN), (HIDDEN, FEATURES // 2)]
        again = ["_allgather_base_"] if sequence_parallel else []
        assert seen.collectives == [COLLECTIVES[sequence_parallel], again]


def saved_on_rank() -> list[tuple[int, ...]]:
    """Shapes of the activations that the block keeps."""
    block, inputs, _ = _prepared(sequence_parallel=True)
    weights = {id(each) for each in block.parameters()}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights and tensor.dim() == 3:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(inputs)
    return sorted(tuple(tensor.shape) for tensor in saved)


def test_only_this_ranks_positions_are_kept_of_a_column_parallel_input(ranks):
    for shapes in ranks.run(saved_on_rank, world_size=2):
        whole = [shape for shape in shapes if shape[1] == LENGTH]
        # Only the tensor between the linears, whose features are split, has all positions.
        assert whole and {shape[2] for shape in whole} == {FEATURES // 2}
        assert (SEQUENCES, LENGTH // 2, HIDDEN) in shapes


def accumulated_on_rank(sequence_parallel: bool) -> list[tuple[torch.dtype, bool]]:
    """Type of each gradient of 16-bit weights after two backwards, and whether it is the float32 sum of both."""
    mesh = ParallelMesh.over_world(Layout(tensor=2), sequence_parallel=sequence_parallel)
    linear = ColumnParallelLinear(HIDDEN, FEATURES, mesh=mesh, dtype=torch.bfloat16, bias=True)
    with torch.no_grad():
        linear.weight.copy_(_values(FEATURES, HIDDEN, seed=1))
        linear.bias.zero_()
    here = mesh.sequence_range(LENGTH)

    def backward(seed: int) -> None:
        inputs = _values(SEQUENCES, LENGTH, HIDDEN, seed=seed)[:, here.start : here.stop].bfloat16()
        output = linear(inputs.requires_grad_())
        output.backward(_values(*output.shape, seed=seed + 1).bfloat16())

    separate = []
    for seed in (3, 5):
        backward(seed)
        separate.append([each.grad.float() for each in linear.parameters()])
        linear.zero_grad()
    for each in linear.parameters():
        each.grad_dtype = torch.float32
    for seed in (3, 5):
        backward(seed)
    return [
        (each.grad.dtype, torch.equal(each.grad, one + other))
        for each, one, other in zip(linear.parameters(), *separate, strict=True)
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "split"])
def test_gradients_of_narrow_weights_accumulate_in_float32(ranks, sequence_parallel):
    for seen in ranks.run(accumulated_on_rank, world_size=2, sequence_parallel=sequence_parallel):
        assert seen == [(torch.float32, True)] * 2
