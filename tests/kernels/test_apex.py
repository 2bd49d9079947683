"""Apex's compiled parts are used where they truly are, and nothing else of that name is; faked through sys.modules."""

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.cli import doctor
from megalite.launcher.environment import without_apex
from megalite.ops import apex
from megalite.ops.adamw import accumulate_, adamw_, scale_, sum_of_squares
from megalite.parallel import layers
from megalite.parallel.gradient_sums import sum_in_place
from megalite.parallel.mesh import ParallelMesh
from megalite.train.fused_adamw import OnePassAdamW
from tests.kernels.test_adamw import ADAMW
from tests.support.parity import FLOAT32_RTOL, NARROW_FLOOR, assert_close
from tests.unit.train.test_optimizer import made

CPU = torch.device("cpu")


class Fake:
    """The two compiled modules, computed by torch, with how often each symbol was called."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.amp_C, self.wgrad = ModuleType("amp_C"), ModuleType("fused_weight_gradient_mlp_cuda")
        self._add(self.amp_C, self.multi_tensor_l2norm)
        self._add(self.amp_C, self.multi_tensor_scale)
        self._add(self.amp_C, self.multi_tensor_adam)
        self._add(self.wgrad, self.wgrad_gemm_accum_fp32)

    def _add(self, module: ModuleType, function: Callable[..., Any]) -> None:
        def counted(*arguments: Any) -> Any:
            self.calls[function.__name__] = self.calls.get(function.__name__, 0) + 1
            return function(*arguments)

        setattr(module, function.__name__, counted)

    def multi_tensor_l2norm(self, _chunk: int, flag: Tensor, lists: list[list[Tensor]], per: bool) -> Any:
        assert flag.dtype == torch.int32 and not per
        return torch.cat([each.flatten().float() for each in lists[0]]).norm().view(1), None

    def multi_tensor_scale(
        self, _chunk: int, _flag: Tensor, lists: list[list[Tensor]], factor: float
    ) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    def multi_tensor_adam(self, _chunk: int, _flag: Tensor, lists: Any, *rules: Any) -> None:
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
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """Compiled parts that work, on a device where they would: the CPU stands for it."""
    made = Fake()
    monkeypatch.setitem(sys.modules, "amp_C", made.amp_C)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", made.wgrad)
    monkeypatch.setattr(apex, "_device", lambda: CPU)
    monkeypatch.delenv("MEGALITE_NO_APEX", raising=False)
    apex._choose.cache_clear()
    yield made
    apex._choose.cache_clear()


def test_what_is_there_and_right_is_used(fake, caplog):
    with caplog.at_level(logging.INFO, logger="megalite.ops.apex"):
        assert apex.choices() == {
            "norm": "amp_C.multi_tensor_l2norm",
            "scale": "amp_C.multi_tensor_scale",
            "AdamW": "amp_C.multi_tensor_adam",
            "weight gradients": "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32",
        }
        apex.choices()
    assert len(caplog.messages) == 4, "each choice is made and logged once"
    tensors = [torch.randn(5), torch.randn(3, 2), torch.randn(4).bfloat16()]
    exact = sum(each.double().square().sum() for each in tensors)
    fake.calls.clear()
    assert_close(sum_of_squares(tensors), exact, rtol=FLOAT32_RTOL)
    scale_(tensors, 0.5)
    assert_close(sum_of_squares(tensors), exact / 4, rtol=FLOAT32_RTOL)
    assert fake.calls == {"multi_tensor_l2norm": 4, "multi_tensor_scale": 2}, "one call for each type"


def test_the_trainer_updates_by_it(fake):
    def stepped() -> tuple[OnePassAdamW | torch.optim.Optimizer, dict[str, Tensor]]:
        optimizer, tensors = made(ADAMW, torch.bfloat16)
        torch.manual_seed(2)
        for _ in range(3):
            for tensor in tensors.values():
                tensor.grad = torch.randn(tensor.shape)
            optimizer.step(1e-2)
        return optimizer._optimizer, {
            name: each.detach().clone() for name, each in optimizer._masters.items()
        }

    by_apex, weights = stepped()
    assert isinstance(by_apex, OnePassAdamW) and fake.calls["multi_tensor_adam"] > 3
    del sys.modules["amp_C"]
    apex._choose.cache_clear()
    by_torch, expected = stepped()
    assert type(by_torch) is torch.optim.AdamW
    for name, weight in expected.items():
        assert_close(weights[name], weight, rtol=FLOAT32_RTOL, what=name)


def test_linears_add_to_their_gradients_by_it(fake):
    linear = layers.RowParallelLinear(8, 4, mesh=ParallelMesh.single(), dtype=torch.bfloat16)
    torch.nn.init.normal_(linear.weight)
    linear.weight.grad_dtype = torch.float32
    sum_in_place([linear.weight], accumulate_)
    apex.accumulate_weight_gradient(CPU)
    fake.calls.clear()
    batches = [torch.randn(2, 3, 8).bfloat16() for _ in range(3)]
    for inputs in batches:
        linear(inputs).sum().backward()
    assert fake.calls == {"wgrad_gemm_accum_fp32": 2}, "autograd takes the first as it is"
    exact = sum(inputs.float().sum(dim=(0, 1)).expand(4, 8) for inputs in batches)
    # The first product is rounded to 16 bits.
    assert_close(linear.weight.grad, exact, rtol=NARROW_FLOOR["bf16"])


def test_float64_is_not_given_to_it(fake):
    assert apex.adamw(CPU) is not None
    fake.calls.clear()
    lists = [[torch.ones(3, dtype=torch.float64)] for _ in range(4)]
    rules = {"learning_rate": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 1}
    adamw_(lists[0], [], *lists[1:], **rules)
    assert not fake.calls


@pytest.mark.parametrize("error", [ImportError, RuntimeError, OSError], ids=lambda each: each.__name__)
def test_another_apex_neither_breaks_nor_fools(fake, monkeypatch, error):
    """Of the PyPI package, and of NVIDIA's without compiled parts, amp_C is not there or raises what it likes."""
    for name in ("amp_C", "fused_weight_gradient_mlp_cuda"):
        monkeypatch.delitem(sys.modules, name)
    words = "cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session'"

    def find(name: str) -> ModuleType:
        raise error(words)

    monkeypatch.setattr(apex.importlib, "import_module", find)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    assert set(apex.choices().values()) == {f"not used: {error.__name__}: {words}"}
    assert apex.l2_norm(CPU) is None and apex.scale(CPU) is None and apex.adamw(CPU) is None
    assert_close(sum_of_squares([torch.full((4,), 2.0)]), 16.0)


def test_the_real_machine_has_no_compiled_apex_to_use():
    """Whatever is called apex here, without a GPU nothing of it is imported."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert set(apex.choices().values()) == {"not used: torch sees no GPU"}


@pytest.mark.parametrize(
    ("symbol", "wrong", "part"),
    [
        ("multi_tensor_l2norm", lambda *_: (torch.tensor([7.0]), None), "norm"),
        ("multi_tensor_l2norm", lambda *_: (torch.tensor([float("nan")]), None), "norm"),
        ("multi_tensor_scale", lambda *_: None, "scale"),
        ("multi_tensor_adam", lambda *_: None, "AdamW"),
        ("multi_tensor_adam", "no function", "AdamW"),
    ],
)
def test_a_part_that_computes_wrongly_is_left_alone(fake, symbol, wrong, part):
    setattr(fake.amp_C, symbol, wrong)
    assert apex.choices()[part].startswith("not used: ")
    assert apex._serve(part, CPU) is None
    others = [each for each in apex.PARTS if each != part]
    assert all(apex._serve(each, CPU) is not None for each in others), "each part is chosen by itself"


def test_the_switch_turns_all_off(fake, monkeypatch):
    monkeypatch.setenv("MEGALITE_NO_APEX", "1")
    assert set(apex.choices().values()) == {"not used: MEGALITE_NO_APEX=1"}
    assert not fake.calls
    assert not without_apex({}) and not without_apex({"MEGALITE_NO_APEX": "0"})


def test_doctor_says_what_of_it_is_used(fake, capsys):
    doctor.run([])
    assert "norm: amp_C.multi_tensor_l2norm" in " ".join(capsys.readouterr().out.split())
