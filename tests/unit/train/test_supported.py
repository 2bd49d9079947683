"""What the configuration accepts and the trainer does not run yet is refused before anything starts."""

import pytest

from megalite.config.load import load_config
from megalite.errors import ConfigError
from megalite.train.supported import asked_precision, require_supported
from tests.support.jobs import ROOT

RUN_FILE = ROOT / "examples" / "quickstart" / "run.toml"
ONE_STAGE = ("--parallel.pipeline", "1")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--training.precision", "fp16"), "training.precision"),
        (
            (*ONE_STAGE, "--deepspeed.zero_optimization.offload_optimizer.device", "nvme"),
            "deepspeed.zero_optimization.offload_optimizer",
        ),
    ],
)
def test_what_is_not_run_yet_is_named(flags, key):
    config = load_config(RUN_FILE, flags)
    with pytest.raises(ConfigError) as caught:
        require_supported(config, "run.toml")
    assert [problem.key for problem in caught.value.problems] == [key]
    assert caught.value.problems[0].remedy


def test_a_missing_tensorboard_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"monitor\.tensorboard: .* not installed; .*pip install tensorboard"
    ):
        require_supported(load_config(RUN_FILE, ("--monitor.tensorboard", "true")), "run.toml")


def test_auto_leaves_out_what_is_not_run():
    config = load_config(RUN_FILE, ())
    assert (config.training.precision, asked_precision(config)) == ("auto", "fp32")
    assert asked_precision(load_config(RUN_FILE, ("--training.precision", "bf16"))) == "bf16"


def test_the_quickstart_is_supported():
    require_supported(load_config(RUN_FILE, ()), "run.toml")
