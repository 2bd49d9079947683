"""An optimizer is a record and a module: one that this test adds validates, estimates memory, trains and resumes."""

import os
import subprocess
import sys
from pathlib import Path

import megalite

RECORD = """
from megalite.topology.optimizers import OPTIMIZERS, OptimizerRecord, OptimizerStateKey

OPTIMIZERS["heavy_ball"] = OptimizerRecord(
    "heavy_ball", (OptimizerStateKey("velocity"),), ("momentum",), momentum=0.5
)
"""
MATHEMATICS = '''
"""Heavy-ball momentum."""

import torch

from megalite.train.optimizer.rule import OptimizerParts, UpdateRule


class HeavyBall(UpdateRule):
    def __init__(self, groups, momentum):
        super().__init__(groups, {"lr": 0.0, "momentum": momentum})

    def initial_state(self, weight):
        return {"velocity": torch.zeros_like(weight)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in self.weights_with_gradients(group):
                velocity = self.state[weight]["velocity"]
                velocity.mul_(group["momentum"]).add_(weight.grad)
                weight.add_(velocity, alpha=-group["lr"])


def make(parts: OptimizerParts) -> torch.optim.Optimizer:
    return HeavyBall(parts.groups(), parts.settings.optimizer.momentum_or_default)
'''
USE = """
import sys
from pathlib import Path

import torch

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import read_manifest
from megalite.planner.memory import memory_of_stages
from megalite.errors import ConfigError
from tests.support.checkpoint_pairs import save
from tests.support.matrix.rows import config_of
from tests.unit.train.test_resume import trainer_of

heavy = {"optimizer__name": "heavy_ball", "optimizer__ema_decay": 0.0, "data__loader_workers": 0}
trainer = trainer_of(**heavy)
before = {name: weight.detach().clone() for name, weight in trainer.replica.tensors.items()}
trainer.train_step()
assert trainer.config.optimizer.momentum == 0.5
assert any(not torch.equal(before[name], weight) for name, weight in trainer.replica.tensors.items())
kept = {shard.key for shard in trainer.optimizer.state.shards()}
assert kept == {"velocity"}, kept
[memory] = memory_of_stages(trainer.config, trainer.shape.vocab_size)
assert memory.optimizer == sum(shard.values.nbytes for shard in trainer.optimizer.state.shards())
folder = save(trainer, Path(sys.argv[1]))
manifest = read_manifest(folder)
check_coverage(manifest, folder)
assert manifest.optimizer_state_keys == {"velocity"}
expected = trainer.train_step().loss
resumed = trainer_of(**heavy, resumed=True)
resumed.resume(folder)
assert resumed.train_step().loss == expected
try:
    trainer_of(**heavy, optimizer__betas=[0.5, 0.5])
except ConfigError as error:
    assert 'optimizer.betas: [0.5, 0.5] has no effect with optimizer.name = "heavy_ball"' in str(error), error
else:
    raise AssertionError("betas are read by nobody")
print("trained")
"""


def test_a_record_and_a_module_are_all(tmp_path: Path) -> None:
    (tmp_path / "heavy_ball.py").write_text(MATHEMATICS, encoding="utf-8")
    extended = f"import megalite.train.optimizer as home\nhome.__path__.append({str(tmp_path)!r})\n"
    script = tmp_path / "use.py"
    script.write_text(RECORD + extended + USE, encoding="utf-8")
    root = Path(megalite.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.endswith("trained\n"), result.stderr
