"""The defaults that megalite names of another program are those of that program as it is installed."""

import inspect
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from megalite.config.deepspeed.optimizer import TORCH_ADAMW_DECAY
from megalite.config.sources import peft
from megalite.parallel.gradients import clip_factor
from megalite.topology.optimizers import OPTIMIZERS
from tests.support.museum import exhibit
from tests.support.parity import assert_close
from tests.support.planted import Planted, instead
from tests.unit.config.runs import load

OPTIMIZER = {"optimizer": {"type": "AdamW"}}


@exhibit(
    "DeepSpeed PR#8068",
    subject="optimizer",
    there="DeepSpeed's default of `gradient_clipping` became 1.0, and other programs still said that it does not clip",
    here="a JSON without the key clips as the installed DeepSpeed does",
    fault=Planted("megalite.config.deepspeed.read:_GRADIENT_CLIPPING", instead(0.0)),
)
def test_deepspeed_clips_and_keeps_the_rate_by_default(tmp_path: Path) -> None:
    deepspeed = pytest.importorskip("deepspeed.runtime.config")
    assert deepspeed.get_scheduler_name({}) is None
    loaded = load(tmp_path, ds_json=OPTIMIZER)
    assert loaded.config.optimizer.gradient_clipping == deepspeed.get_gradient_clipping({})
    assert loaded.origin("optimizer.gradient_clipping") == "DeepSpeed's default of gradient_clipping"
    assert not [note for note in loaded.notes if "clip" in note]
    [note] = [note for note in loaded.notes if "scheduler is not set" in note]
    assert "DeepSpeed keeps the learning rate" in note
    assert (
        load(
            tmp_path, {"optimizer.gradient_clipping": 0.0}, ds_json=OPTIMIZER
        ).config.optimizer.gradient_clipping
        == 0
    )


def test_the_hysteresis_and_the_bucket_are_deepspeeds(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    loaded = load(tmp_path, ds_json={**OPTIMIZER, "fp16": {"enabled": True}})
    assert loaded.config.training.loss_scale_hysteresis == DeepSpeedFP16Config().hysteresis
    # config/deepspeed/zero_defaults.py says so.
    assert DeepSpeedZeroConfig().reduce_bucket_size == 5e8


def test_the_defaults_of_torchs_optimizers() -> None:
    of_sgd, of_adamw = (inspect.signature(each).parameters for each in (torch.optim.SGD, torch.optim.AdamW))
    sgd = OPTIMIZERS["sgd"].deepspeed
    assert sgd is not None and sgd.defaults == {name: of_sgd[name].default for name in sgd.defaults}
    assert of_adamw["weight_decay"].default == TORCH_ADAMW_DECAY


def test_clipping_has_the_epsilon_of_torch() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weight.grad = torch.tensor([3e-6, 4e-6], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([weight], 1e-6)
    assert_close(weight.grad, torch.tensor([3e-6, 4e-6], dtype=torch.float64) * clip_factor(5e-6, 1e-6))


def test_the_defaults_of_lora_are_pefts() -> None:
    theirs = LoraConfig()
    assert {name: getattr(theirs, name) for name in peft._DEFAULTS} == peft._DEFAULTS


def test_an_older_form_has_the_stage_of_accelerate() -> None:
    source = inspect.getsource(pytest.importorskip("accelerate.utils.dataclasses").DeepSpeedPlugin)
    assert 'get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)' in source
