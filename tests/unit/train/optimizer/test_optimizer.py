"""The torch path on one process: groups, clipping by value, the average of weights."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megalite.config.sections.schema import OptimizerConfig
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameter_groups import ParameterGroup
from megalite.topology.stages import pipeline_split
from megalite.topology.state import EMA
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.torch import TorchOptimizer
from tests.support.options import changed
from tests.support.parity import FLOAT32_RTOL, OPERATOR_RTOL, ZERO_RTOL, about, assert_close
from tests.support.tiny import tiny_shape

SHAPE = tiny_shape(layers=2)
SGD = OptimizerSettings(OptimizerConfig(name="sgd", weight_decay=0.0, gradient_clipping=0.0))
NORM, QKV = "model.norm.weight", "model.layers.1.self_attn.qkv_proj.weight"


def made(
    settings: OptimizerSettings, dtype: torch.dtype = torch.float64
) -> tuple[TorchOptimizer, dict[str, Tensor]]:
    options, split = ModelOptions(dtype=dtype), pipeline_split(2, 1)
    replica = build_replica(SHAPE, ParallelMesh.single(), split, options, seed=3)
    return TorchOptimizer(replica, settings), dict(replica.tensors)


def changes(settings: OptimizerSettings, gradient: float = 1.0) -> dict[str, Tensor]:
    """Return the change of the weights by one update with a learning rate of 0.5 and equal gradients."""
    optimizer, tensors = made(settings)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = torch.full_like(tensor, gradient)
    optimizer.step(0.5, float(optimizer.squared_norm()))
    return {name: tensor.detach() - before[name] for name, tensor in tensors.items()}


def test_a_group_has_its_own_rate_and_decay():
    groups = (ParameterGroup("*.1.self_attn.[qkv]_proj.*", 0.1), ParameterGroup("model.norm.*", 2.0, 0.5))
    moved = changes(changed(SGD, weight_decay=0.0, groups=groups))
    assert_close(moved[QKV], torch.full_like(moved[QKV], -0.05))
    # Norms do not decay unless a group says so: torch's SGD adds decay * weight (1) to the gradient.
    assert_close(moved[NORM], torch.full_like(moved[NORM], -0.5 * 2 * 1.5))
    assert_close(moved["lm_head.weight"], torch.full_like(moved["lm_head.weight"], -0.5))


def test_weights_decay_and_norms_do_not():
    moved = changes(changed(SGD, weight_decay=0.5), gradient=0.0)
    assert not moved[NORM].any() and moved[QKV].any()


def test_values_are_clipped_before_the_norm():
    optimizer, tensors = made(changed(SGD, clip_value=0.25, gradient_clipping=1e9))
    spread = torch.linspace(-1, 1, tensors[QKV].numel(), dtype=torch.float64).view_as(tensors[QKV])
    before = tensors[QKV].detach().clone()
    for name, tensor in tensors.items():
        tensor.grad = spread.clone() if name == QKV else torch.zeros_like(tensor)
    update = optimizer.step(1.0, float(optimizer.squared_norm()))
    assert update.grad_norm == about(spread.norm().item())
    assert_close(before - tensors[QKV].detach(), spread.clamp(-0.25, 0.25), rtol=OPERATOR_RTOL)

    moved = changes(changed(SGD, clip_value=0.25, gradient_clipping=1.0), gradient=-7.0)
    norm = torch.cat([each.flatten() for each in moved.values()]).norm()
    # By the norm of what clipping by value leaves, so nothing is cut twice.
    assert norm.item() == about(0.5, FLOAT32_RTOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_weights_follows_the_masters(dtype):
    optimizer, tensors = made(changed(SGD, ema_decay=0.75), dtype)
    start = {name: tensor.detach().float().clone() for name, tensor in tensors.items()}
    for _ in range(3):
        for tensor in tensors.values():
            tensor.grad = torch.ones_like(tensor, dtype=torch.float32)
        optimizer.step(2**-6, float(optimizer.squared_norm()))
    averages = {shard.parameter.name: shard for shard in optimizer.state.shards() if shard.key == EMA}
    assert averages.keys() == tensors.keys()
    # Weights fall by 2^-6 a step: their average lags 0.75 * (1 + 2 * 0.75 + ... ) behind.
    lag = 0.0
    for step in range(1, 4):
        lag = 0.75 * lag + 0.25 * step
    for name, shard in averages.items():
        assert shard.values.dtype == torch.float32
        assert_close(shard.values.view_as(start[name]), start[name] - lag * 2**-6, rtol=ZERO_RTOL, what=name)


def test_a_gradient_that_is_wider_than_its_weight_is_summed_so():
    optimizer, tensors = made(SGD, torch.bfloat16)
    del optimizer
    assert all(tensor.grad_dtype == torch.float32 for tensor in tensors.values())
    _, tensors = made(changed(SGD, accumulation="model"), torch.bfloat16)
    assert all(tensor.grad_dtype == torch.bfloat16 for tensor in tensors.values())


def test_a_step_of_the_compiled_update_does_not_import_torchs_compiler() -> None:
    """Its import takes as long as torch's own, and every start of a run would pay."""
    script = """
import sys, torch
from megalite.train.optimizer.adamw import OnePassAdamW
from megalite.train.optimizer.update import spare_compiler
spare_compiler()
weight = torch.nn.Parameter(torch.ones(3))
def update(*arguments, **keywords): pass
groups = [{"params": [weight], "lr": 0.1, "ema_decay": 0}]
optimizer = OnePassAdamW(groups, {}, betas=(0.9, 0.95), eps=1e-8, update=update)
weight.grad = torch.ones(3)
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
torch.optim.SGD([weight], lr=0.1).step()
print("torch._dynamo" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["False", "True"], run.stderr
