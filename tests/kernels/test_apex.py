"""Apex's compiled kernels, replaced by torch functions: called if chosen, and no other package of that name is used."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.launcher.rank.environment import without_apex
from megalite.model.options import ModelOptions
from megalite.ops import apex
from megalite.ops.adamw import AdamWRule, AdamWTensors
from megalite.ops.choice import Operators
from megalite.parallel import layers
from megalite.parallel.gradient_sums import WeightGradients
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.pipeline import weight_share
from megalite.selftest import trust
from megalite.selftest.optimizer import ENTRIES
from megalite.selftest.prove import prove
from megalite.selftest.registry import Case
from megalite.topology.stages import pipeline_split
from megalite.train.assemble import StepSchedule, TrainingPlan, assemble
from megalite.train.optimizer.adamw import OnePassAdamW, TorchAdamW
from tests.kernels.test_adamw import ADAMW
from tests.support.options import changed
from tests.support.parity import FLOAT32_RTOL, NARROW_FLOOR, assert_close
from tests.support.tiny import tiny_batch, tiny_shape
from tests.unit.train.optimizer.test_optimizer import made

CPU = torch.device("cpu")
CHOSEN = Operators.all("apex", ("adamw", "accumulate"))
SERVED = {entry.operator: entry for entry in ENTRIES if "apex" in entry.candidates}


class Fake:
    """The two compiled modules, computed by torch, with the number of calls of each symbol."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.amp_C, self.wgrad = ModuleType("amp_C"), ModuleType("fused_weight_gradient_mlp_cuda")
        self._add(self.amp_C, self.multi_tensor_adam)
        self._add(self.wgrad, self.wgrad_gemm_accum_fp32)

    def _add(self, module: ModuleType, function: Callable[..., Any]) -> None:
        def counted(*arguments: Any) -> Any:
            self.calls[function.__name__] = self.calls.get(function.__name__, 0) + 1
            return function(*arguments)

        setattr(module, function.__name__, counted)
        module.__spec__ = ModuleSpec(module.__name__, None)

    def multi_tensor_adam(self, _chunk: int, flag: Tensor, lists: Any, *rules: Any) -> None:
        assert flag.dtype == torch.int32
        rate, beta1, beta2, eps, step, mode, corrected, decay = rules
        assert (mode, corrected) == (1, 1) and isinstance(step, int)
        for gradient, weight, mean, square in zip(*lists, strict=True):
            mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (square / (1 - beta2**step)).sqrt_().add_(eps)
            weight.sub_(rate * (mean / (1 - beta1**step) / denominator + decay * weight))

    def wgrad_gemm_accum_fp32(self, inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        total.add_(gradient.float().t() @ inputs.float())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Install working fakes of the compiled modules."""
    made = Fake()
    monkeypatch.setitem(sys.modules, "amp_C", made.amp_C)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", made.wgrad)
    monkeypatch.delenv("MEGALITE_NO_APEX", raising=False)
    return made


def complaints(device_type: str) -> list[str]:
    return [entry.candidates["apex"].why_not_on(device_type) for entry in SERVED.values()]


def test_the_trainer_updates_by_it(fake):
    def stepped(operators: Operators) -> tuple[OnePassAdamW | torch.optim.Optimizer, dict[str, Tensor]]:
        optimizer, tensors = made(replace(ADAMW, operators=operators), torch.bfloat16)
        torch.manual_seed(2)
        for _ in range(3):
            for tensor in tensors.values():
                tensor.grad = torch.randn(tensor.shape)
            optimizer.step(1e-2, float(optimizer.squared_norm()))
        return optimizer._optimizer, {
            name: each.detach().clone() for name, each in optimizer._masters.items()
        }

    by_apex, weights = stepped(CHOSEN)
    assert isinstance(by_apex, OnePassAdamW) and fake.calls["multi_tensor_adam"] >= 3
    fake.calls.clear()
    by_torch, expected = stepped(Operators())
    assert type(by_torch) is TorchAdamW and not fake.calls
    for name, weight in expected.items():
        assert_close(weights[name], weight, rtol=FLOAT32_RTOL, what=name)


def test_linears_add_to_their_gradients_by_it(fake):
    gradients = WeightGradients(CHOSEN.accumulate)
    linear = layers.RowParallelLinear(
        8, 4, mesh=ParallelMesh.single(), dtype=torch.bfloat16, gradients=gradients
    )
    torch.nn.init.normal_(linear.weight)
    linear.weight.grad_dtype = torch.float32
    batches = [torch.randn(2, 3, 8).bfloat16() for _ in range(3)]
    for inputs in batches:
        linear(inputs).sum().backward()
    assert fake.calls == {"wgrad_gemm_accum_fp32": 2}, "autograd takes the first as it is"
    exact = sum(inputs.float().sum(dim=(0, 1)).expand(4, 8) for inputs in batches)
    # The first product is rounded to bf16.
    assert_close(linear.weight.grad, exact, rtol=NARROW_FLOOR["bf16"])


@pytest.mark.parametrize(("operators", "sum_in_fp32"), [(CHOSEN, True), (CHOSEN, False), (Operators(), True)])
def test_the_trainer_has_linears_add_by_what_was_chosen(fake, operators, sum_in_fp32):
    shape, mesh = tiny_shape(layers=1), ParallelMesh.single()
    options = ModelOptions(torch.bfloat16, operators=operators)
    settings = changed(ADAMW, accumulation="fp32" if sum_in_fp32 else "model")
    plan = TrainingPlan(shape, pipeline_split(1), options, settings, StepSchedule(micro_batches=3))
    _, _, pipeline = assemble(plan, mesh, seed=3)
    batch = tiny_batch(shape, 3)
    pipeline.forward_backward(batch, weight_share(batch, mesh))
    linears = 4 + 1  # of the layer, and the head
    by_apex = operators is CHOSEN and sum_in_fp32
    assert fake.calls.get("wgrad_gemm_accum_fp32", 0) == (2 * linears if by_apex else 0)


def test_float64_is_not_given_to_it(fake):
    lists = [[torch.ones(3, dtype=torch.float64)] for _ in range(4)]
    rules = {"learning_rate": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 1}
    CHOSEN.adamw(AdamWTensors(lists[0], [], *lists[1:]), AdamWRule(**rules))
    assert not fake.calls and not lists[0][0].eq(1).any()


def own_case(operator: str) -> Case:
    entry = SERVED[operator]
    return Case(entry, torch.bfloat16, entry.shapes, own=False)


@pytest.mark.parametrize("operator", ["adamw", "accumulate"])
def test_the_self_test_takes_what_is_there_and_right(fake, operator):
    assert complaints("cuda") == ["", ""]
    assert prove(own_case(operator), "apex", CPU).right and fake.calls


@pytest.mark.parametrize(
    ("operator", "module", "symbol"),
    [
        ("adamw", "amp_C", "multi_tensor_adam"),
        ("accumulate", "wgrad", "wgrad_gemm_accum_fp32"),
    ],
)
def test_what_computes_wrongly_is_left_alone(fake, operator, module, symbol):
    """A kernel that does nothing is wrong; a missing kernel, or one that is not callable, raises in the worker."""
    setattr(getattr(fake, module), symbol, lambda *_: None)
    assert prove(own_case(operator), "apex", CPU).verdict == "wrong"
    setattr(getattr(fake, module), symbol, "no function")
    with pytest.raises(TypeError):
        prove(own_case(operator), "apex", CPU)
    delattr(getattr(fake, module), symbol)
    with pytest.raises(AttributeError):
        prove(own_case(operator), "apex", CPU)
    other = "accumulate" if operator == "adamw" else "adamw"
    assert prove(own_case(other), "apex", CPU).right, "each is chosen by itself"


def test_another_apex_neither_breaks_nor_fools(monkeypatch, tmp_path: Path):
    """The PyPI package, and NVIDIA's without compiled modules, have no amp_C; neither is imported."""
    monkeypatch.delenv("MEGALITE_NO_APEX", raising=False)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert complaints("cuda") == [
        "Apex's compiled module amp_C is not installed",
        "Apex's compiled module fused_weight_gradient_mlp_cuda is not installed",
    ]
    assert apex.modules() == []


def test_a_compiled_module_that_cannot_be_imported_is_met_by_the_self_tests_worker_alone(
    monkeypatch, tmp_path: Path
):
    monkeypatch.delenv("MEGALITE_NO_APEX", raising=False)
    (tmp_path / "amp_C.py").write_text("raise OSError('libcudart.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amp_C", raising=False)
    assert apex.modules() == ["amp_C"] and complaints("cuda")[0] == ""
    with pytest.raises(OSError, match="libcudart"):
        prove(own_case("adamw"), "apex", CPU)


def test_a_cpu_has_no_use_for_it(fake):
    assert complaints("cpu") == ["Apex has no kernels for devices of type cpu"] * 2


def test_the_switch_turns_all_off(fake, monkeypatch):
    kept = trust.machine(CPU)
    assert "amp_C, fused_weight_gradient_mlp_cuda" in kept["packages"]
    monkeypatch.setenv("MEGALITE_NO_APEX", "1")
    assert complaints("cuda") == ["MEGALITE_NO_APEX=1"] * 2
    assert trust.trust_file(trust.machine(CPU)) != trust.trust_file(kept), "what was kept with it is not read"
    assert not fake.calls
    assert not without_apex({}) and not without_apex({"MEGALITE_NO_APEX": "0"})
