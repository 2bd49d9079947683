"""Liger's kernels, stood in for by torch with their signatures: called where they are chosen, and nowhere else."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.ops import liger
from megalite.ops.choice import Operators
from megalite.parallel.mesh import ParallelMesh
from megalite.selftest import activations, norms
from megalite.selftest.check import check
from megalite.topology.stages import pipeline_split
from tests.support.parity import assert_same_tensors
from tests.support.tiny import FAMILY_SHAPES, tiny_batch, tiny_shape

CHOSEN = ModelOptions(torch.float64, operators=Operators.all("liger", ("norm", "add_norm", "glu")))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a fake package that computes with torch; return the list of its calls."""
    names: list[str] = []

    def liger_rms_norm(
        X: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
    ) -> Tensor:
        assert offset == 0.0 and casting_mode == "llama" and not in_place
        names.append("norm")
        return F.rms_norm(X, W.shape, W, eps)

    def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
        names.append("glu")
        return F.silu(a) * b

    functional = ModuleType("liger_kernel.transformers.functional")
    functional.liger_rms_norm, functional.liger_swiglu = liger_rms_norm, liger_swiglu  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    return names


def gradients(options: ModelOptions, shape=None) -> dict[str, Tensor]:
    shape = shape or tiny_shape()
    batch = tiny_batch(shape, 2)
    stage = build_replica(
        shape, ParallelMesh.single(), pipeline_split(shape.num_hidden_layers), options, seed=1
    ).stage
    hidden = stage.whole.decode(batch.input_ids, batch.position_ids)
    hidden.square().sum().backward()
    return {name: each.grad for name, each in stage.named_parameters() if each.grad is not None}


def test_a_model_calls_what_was_chosen(calls: list[str]) -> None:
    assert_same_tensors(gradients(CHOSEN), gradients(replace(CHOSEN, operators=Operators())))
    layers = tiny_shape().num_hidden_layers
    assert calls.count("glu") == layers and calls.count("norm") >= layers


def test_norms_of_1_plus_weight_are_torchs(calls: list[str]) -> None:
    shape = FAMILY_SHAPES["gemma"]
    assert_same_tensors(gradients(CHOSEN, shape), gradients(replace(CHOSEN, operators=Operators()), shape))
    assert "norm" not in calls


@pytest.mark.parametrize("entry", [norms.ENTRIES[0], activations.ENTRIES[0]], ids=lambda entry: entry.name)
def test_the_self_test_takes_them(calls: list[str], entry) -> None:
    for shape in entry.shapes:
        assert check(entry, "liger", shape, torch.float32, "cpu").share <= 1
    assert calls


def test_where_it_is_not_installed_it_says_so() -> None:
    assert liger.why_not("cpu") == "liger_kernel has no kernels for devices of type cpu"
    assert liger.why_not("cuda") == "liger_kernel is not installed"
