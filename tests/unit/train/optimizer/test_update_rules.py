"""Muon, Adafactor and Lion in one process against torch's and the papers' formulas; their state; 16-bit models."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.config.sections.schema import OptimizerConfig
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import model_parameters
from megalite.topology.stages import pipeline_split
from megalite.topology.state import MASTER, state_tensors
from megalite.train.optimizer.muon import Muon, orthogonalised
from megalite.train.optimizer.rule import OptimizerParts
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.torch import TorchOptimizer
from megalite.train.optimizer.update import torch_optimizer
from tests.support.options import changed
from tests.support.parity import FLOAT32_RTOL, OPERATOR_RTOL, assert_close
from tests.support.tiny import tiny_shape

SHAPE = tiny_shape(layers=1)
MUON = OptimizerSettings(OptimizerConfig(name="muon", gradient_clipping=0.0))
LION = changed(MUON, name="lion", betas=(0.9, 0.99))
ADAFACTOR = changed(MUON, name="adafactor")
DOWN, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
PARAMETERS = {each.name: each for each in model_parameters(SHAPE)}


def gradients(weight: Tensor, steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(weight.shape, dtype=weight.dtype, generator=generator) for _ in range(steps)]


def updated(
    settings: OptimizerSettings,
    names: Sequence[str],
    dtype: torch.dtype,
    make: Callable[[OptimizerParts], torch.optim.Optimizer] = torch_optimizer,
) -> list[Tensor]:
    """Return weights of the model's shapes after four updates of these parameters alone."""
    parameters = [PARAMETERS[name] for name in names]
    weights = {each.name: torch.nn.Parameter(start(each.spec.full_shape, dtype)) for each in parameters}
    optimizer = make(OptimizerParts(settings, parameters, weights, ParallelMesh.single()))
    run(optimizer, list(weights.values()))
    return [each.detach() for each in weights.values()]


def run(optimizer: torch.optim.Optimizer, weights: Sequence[torch.nn.Parameter]) -> None:
    for step in range(4):
        for weight in weights:
            weight.grad = gradients(weight)[step]
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
        optimizer.step()


def start(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(5))


def of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    weight = torch.nn.Parameter(start(shape, dtype))
    run(torch.optim.Muon([weight], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), [weight])
    return weight.detach()


def test_a_matrix_is_updated_as_by_torchs_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PARAMETERS[DOWN].spec.full_shape
    # As on an accelerator: torch's Newton-Schulz iterations are in bfloat16 whatever the weight's dtype.
    [in_bf16] = updated(MUON, [DOWN], torch.float32, partial(Muon, dtype=torch.bfloat16))
    assert_close(in_bf16, of_torch(shape, torch.float32), rtol=FLOAT32_RTOL)
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    for dtype, rtol in ((torch.float32, FLOAT32_RTOL), (torch.float64, OPERATOR_RTOL)):
        [ours] = updated(MUON, [DOWN], dtype)
        assert_close(ours, of_torch(shape, dtype), rtol=rtol)


def test_each_part_of_a_fused_weight_is_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    [ours] = updated(MUON, [name], torch.float64)
    weight = start(PARAMETERS[name].spec.full_shape, torch.float64)
    sizes = [part.shape[0] for part in PARAMETERS[name].spec.parts]
    parts = [torch.nn.Parameter(each.clone()) for each in weight.split(sizes)]
    optimizer = torch.optim.Muon(parts, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", lr=0.0)
    for step, whole in enumerate(gradients(weight)):
        for part, gradient in zip(parts, whole.split(sizes), strict=True):
            part.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        optimizer.step()
    assert_close(ours, torch.cat(parts).detach(), rtol=OPERATOR_RTOL)


def test_all_other_weights_are_adamws() -> None:
    others = [name for name, each in PARAMETERS.items() if not each.is_hidden_matrix]
    assert {"model.embed_tokens.weight", "lm_head.weight", NORM} < {*others}
    for name in ("model.embed_tokens.weight", NORM):
        ours = updated(MUON, [name, DOWN], torch.float64)[0]
        weight = torch.nn.Parameter(start(PARAMETERS[name].spec.full_shape, torch.float64))
        decay = 0.1 * PARAMETERS[name].decay
        run(torch.optim.AdamW([weight], betas=(0.9, 0.95), weight_decay=decay), [weight])
        assert_close(ours, weight.detach(), rtol=OPERATOR_RTOL, what=name)


def test_singular_values_become_about_one() -> None:
    for shape in ((40, 70), (70, 40)):
        matrix = start(shape, torch.float64)
        before = matrix.clone()
        values = torch.linalg.svdvals(orthogonalised(matrix))
        assert torch.equal(matrix, before)
        assert values.min() > 0.6 and values.max() < 1.25
    assert not orthogonalised(torch.zeros(3, 4)).any()


@pytest.mark.parametrize("name", [DOWN, NORM, "model.embed_tokens.weight"])
def test_adafactor_is_torchs(name: str) -> None:
    decay = 0.1 * PARAMETERS[name].decay
    for dtype, rtol in ((torch.float32, FLOAT32_RTOL), (torch.float64, OPERATOR_RTOL)):
        [ours] = updated(ADAFACTOR, [name], dtype)
        weight = torch.nn.Parameter(start(PARAMETERS[name].spec.full_shape, dtype))
        run(torch.optim.Adafactor([weight], weight_decay=decay), [weight])
        assert_close(ours, weight.detach(), rtol=rtol, what=name)


def test_lion_follows_the_paper() -> None:
    [ours] = updated(LION, [DOWN], torch.float64)
    weight = start(PARAMETERS[DOWN].spec.full_shape, torch.float64)
    momentum = torch.zeros_like(weight)
    for step, gradient in enumerate(gradients(weight)):
        rate = 0.02 / (step + 1)
        weight = weight - rate * ((0.9 * momentum + 0.1 * gradient).sign() + 0.1 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    assert_close(ours, weight, rtol=OPERATOR_RTOL)


@pytest.mark.parametrize("settings", [MUON, LION, ADAFACTOR], ids=["muon", "lion", "adafactor"])
def test_low_precision_models_have_masters_and_every_tensor_its_state(settings: OptimizerSettings) -> None:
    replica = build_replica(
        SHAPE, ParallelMesh.single(), pipeline_split(1, 1), ModelOptions(dtype=torch.bfloat16), seed=3
    )
    optimizer = TorchOptimizer(replica, changed(settings, ema_decay=0.5))
    # Far below bf16's resolution of the weights: only masters keep it.
    for _ in range(8):
        for tensor in replica.tensors.values():
            tensor.grad = torch.ones_like(tensor, dtype=torch.float32)
        optimizer.step(1e-7, float(optimizer.squared_norm()))
    shards = list(optimizer.state.shards())
    found: dict[str, set[str]] = {}
    for shard in shards:
        found.setdefault(shard.key, set()).update(part.name for part in shard.parameter.spec.parts)
        assert shard.values.dtype == torch.float32
    assert found == {key: {*tensors} for key, tensors in state_tensors(SHAPE, found.keys()).items()}
    [norm] = [each.values for each in shards if each.key == MASTER and each.parameter.name == NORM]
    assert (norm < 1).all() and (replica.tensors[NORM] == 1).all()
