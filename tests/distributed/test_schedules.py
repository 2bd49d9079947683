"""Each rank runs the actions that the schedule lists as data; splitting a backward adds no work."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megalite.model.layer import DecoderLayer
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.model.transformer import Stage
from megalite.parallel.gradient_sums import WeightGradients
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import PipelineRunner, PipelineShapes
from megalite.parallel.schedule import _Step
from megalite.topology.axes import Layout
from megalite.topology.schedules import SCHEDULES, Action
from megalite.topology.stages import pipeline_split
from tests.support.selection import cases
from tests.support.tiny import tiny_batch, tiny_shape
from tests.support.training import whole_loss

SHAPE = tiny_shape(tied=True, layers=8)


@dataclass
class Executed:
    """The actions of one rank in one step."""

    actions: list[Action] = field(default_factory=list)
    layer_calls: Counter[int] = field(default_factory=Counter)
    """Forward calls of each decoder layer."""
    nodes: Counter[str] = field(default_factory=Counter)
    """Autograd nodes of our own in the graphs, by class."""
    node_calls: Counter[str] = field(default_factory=Counter)
    """How often their backward ran."""
    collectives: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    """FLOPs of matrix products, forward and backward."""
    flops_of: Counter[str] = field(default_factory=Counter)
    """The same by kind of action."""


def step_on_rank(schedule: str, layout: Layout, micro_batches: int, chunks: int) -> Executed:
    mesh = ParallelMesh.over_world(layout)
    split = pipeline_split(
        SHAPE.num_hidden_layers,
        layout.pipeline,
        chunks_per_stage=chunks,
        v_shaped=SCHEDULES[schedule].v_shaped,
    )
    gradients = WeightGradients(deferrable=SCHEDULES[schedule].splits_backward)
    stage = build_replica(SHAPE, mesh, split, ModelOptions(weight_gradients=gradients), seed=0).stage
    shapes = PipelineShapes(micro_batches, SHAPE.hidden_size, torch.float32, schedule)
    runner = PipelineRunner(stage.chunks, split, mesh, shapes)
    executed = Executed()
    with recorded(stage, executed), CountedFlops(executed):
        whole_loss(runner, tiny_batch(SHAPE, micro_batches), mesh)
    return executed


class CountedFlops(TorchDispatchMode):
    """FLOPs of all products; torch's own FlopCounterMode hooks modules in a way that a split backward refuses."""

    def __init__(self, executed: Executed):
        super().__init__()
        self.executed = executed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # torch's table has no operators that write in place.
        counted = torch.ops.aten.addmm if func is torch.ops.aten.addmm_.default else func.overloadpacket
        if (flops := flop_registry.get(counted)) is not None:
            self.executed.flops += flops(*args, **(kwargs or {}), out_val=output)
        return output


@contextmanager
def recorded(stage: Stage, executed: Executed) -> Iterator[None]:
    """Everything that happens in the stage and that torch asks of it goes to `executed`."""
    hooks = [chunk.register_forward_hook(lambda *call: _watch(call[2], executed)) for chunk in stage.chunks]
    for name, layer in stage.model.layers.items():
        assert isinstance(layer, DecoderLayer)
        hooks.append(
            layer.register_forward_hook(lambda *call, at=int(name): executed.layer_calls.update([at]))
        )
    with ExitStack() as patches:
        patches.enter_context(patch.object(_Step, "_compute", _recording(executed)))
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
            patches.enter_context(
                patch.object(dist, name, _counting(getattr(dist, name), executed.collectives))
            )
        yield
    for hook in hooks:
        hook.remove()


def _recording(executed: Executed) -> Callable[..., Any]:
    original = _Step._compute

    @wraps(original)
    def recording(self: _Step, action: Action, needed: Tensor | None) -> Any:
        executed.actions.append(action)
        before = executed.flops
        made = original(self, action, needed)
        executed.flops_of[action.kind] += executed.flops - before
        return made

    return recording


def _counting(original: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    @wraps(original)
    def counting(*arguments: Any, **named: Any) -> Any:
        calls[original.__name__] += 1
        return original(*arguments, **named)

    return counting


def _watch(output: Tensor, executed: Executed) -> None:
    """Count the calls of each node of ours in the graph that leads to `output`."""
    found: set[Node] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        waiting += [each for each, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__
            executed.nodes[name] += 1
            node.register_hook(lambda *_, name=name: executed.node_calls.update([name]))


# (stages, micro batches, chunks a stage): with few and many micro batches, in whole and in unequal rounds.
SIZES = {
    "1f1b": [(2, 2, 1), (2, 5, 1), (4, 4, 1), (4, 6, 1)],
    "gpipe": [(2, 1, 1), (2, 5, 1), (4, 4, 1)],
    "interleaved_1f1b": [(2, 4, 2), (2, 6, 3), (3, 8, 2), (4, 6, 2)],
    "looped_bfs": [(2, 3, 2), (2, 4, 3), (4, 5, 2)],
    "interleaved_zero_bubble": [(2, 4, 1), (2, 4, 2), (2, 6, 3), (4, 8, 2)],
    "zbv": [(2, 1, 2), (2, 4, 2), (2, 7, 2), (4, 5, 2), (4, 8, 2)],
    "dualpipev": [(2, 4, 2), (2, 7, 2), (4, 8, 2)],
}


@pytest.mark.parametrize(
    ("schedule", "size"),
    cases(
        [(name, size) for name in SCHEDULES for size in SIZES[name]],
        core=lambda case: case[1] == SIZES[case[0]][1],
    ),
)
def test_executed_actions_are_those_of_the_schedule(ranks, schedule, size):
    stages, micro_batches, chunks = size
    results = ranks.run(
        step_on_rank,
        world_size=stages,
        schedule=schedule,
        layout=Layout(pipeline=stages),
        micro_batches=micro_batches,
        chunks=chunks,
    )
    for stage, executed in enumerate(results):
        assert tuple(executed.actions) == SCHEDULES[schedule].order(stage, *size)


def accumulation_on_rank(schedule: str, micro_batches: int) -> list[Action]:
    mesh = ParallelMesh.over_world(Layout())
    split = pipeline_split(SHAPE.num_hidden_layers)
    stage = build_replica(SHAPE, mesh, split, seed=0).stage
    actions: list[Action] = []

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        micro_batch = sum(action.kind == "F" for action in actions)
        actions.append(Action("F", 0, micro_batch))
        output.register_hook(lambda grad: actions.append(Action("B", 0, micro_batch)))

    stage.whole.register_forward_hook(record)
    shapes = PipelineShapes(micro_batches, SHAPE.hidden_size, torch.float32, schedule)
    runner = PipelineRunner(stage.chunks, split, mesh, shapes)
    whole_loss(runner, tiny_batch(SHAPE, micro_batches), mesh)
    return actions


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_one_stage_accumulates_whatever_the_schedule_is_called(ranks, schedule):
    [actions] = ranks.run(accumulation_on_rank, world_size=1, schedule=schedule, micro_batches=3)
    assert tuple(actions) == SCHEDULES["1f1b"].order(0, 1, 3, 1)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_weight_gradients_are_left_to_w(ranks, schedule):
    """W has the products of the linears' weights: as many FLOPs as their forward, without the attention's."""
    results = ranks.run(
        step_on_rank, world_size=2, schedule=schedule, layout=Layout(pipeline=2), micro_batches=4, chunks=2
    )
    for executed in results:
        forward, inputs, weights = (executed.flops_of[kind] for kind in "FIW")
        assert 0 < weights <= forward <= inputs
        assert weights > 0.8 * forward


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("interleaved_1f1b", 2),
        ("looped_bfs", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
def test_no_schedule_makes_more_work_than_1f1b(ranks, schedule, chunks):
    """Layers run forward once a micro batch, our nodes once backward, and products and collectives are as many."""
    layout, micro_batches = Layout(pipeline=2, tensor=2), 4
    plain, other = (
        ranks.run(
            step_on_rank,
            world_size=layout.world_size,
            schedule=name,
            layout=layout,
            micro_batches=micro_batches,
            chunks=number,
        )
        for name, number in (("1f1b", 1), (schedule, chunks))
    )
    for executed in other:
        assert len(executed.layer_calls) == SHAPE.num_hidden_layers // layout.pipeline
        assert set(executed.layer_calls.values()) == {micro_batches}
        assert executed.node_calls == executed.nodes
    assert sum(executed.flops for executed in other) == sum(executed.flops for executed in plain) > 0
    calls = sum((executed.collectives for executed in other), Counter())
    assert calls == sum((executed.collectives for executed in plain), Counter())
    # Two all-reduces a layer each way, and the embedding's, the head's and the loss's: at least these many.
    assert calls["all_reduce"] >= layout.tensor * micro_batches * (4 * SHAPE.num_hidden_layers + 2)
