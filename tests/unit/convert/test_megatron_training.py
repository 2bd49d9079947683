"""Checkpoints that megatron-core's own optimizers and dist_checkpointing wrote go on here; needs `megatron-core`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.config.sections.schema import OptimizerConfig
from megalite.convert.huggingface.export import ExportedWeights, export
from megalite.parallel.step_batch import StepBatch
from megalite.topology.axes import Layout
from megalite.topology.state import WEIGHT
from megalite.train.optimizer.settings import OptimizerSettings
from tests.support.foreign import Imported, import_folder
from tests.support.megatron_core_model import PADDED, SHAPES
from tests.support.megatron_core_run import ADAM, CLIP, LENGTH, SEQUENCES, STEPS, CoreJob, as_json, tokens
from tests.support.megatron_writer import Written, chunk_of
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.ranks import RankPool
from tests.support.training import Job, build

ROOT = Path(__file__).parents[3]
NOT_INSTALLED = find_spec("megatron") is None or find_spec("megatron.core") is None
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(NOT_INSTALLED, reason="megatron-core is not installed"),
]
BUCKETS = {"sharding": "dp_reshardable", "bucket_size": 20000}
JOBS = {
    "float32": CoreJob("gpt2", dtype="float32"),
    "float32, buckets, tp 2, pp 2": CoreJob(
        "llama tied", tensor=2, pipeline=2, dtype="float32", sharding="dp_reshardable"
    ),
    "a key a layer, tp 2": CoreJob("qwen3", tensor=2, layers_apart=True),
    "buckets, dp 2": CoreJob("llama", data=2, **BUCKETS),
    "fully reshardable, dp 2": CoreJob("llama tied", data=2, sharding="fully_reshardable"),
    "rank files, fp16": CoreJob("gpt2", dtype="float16", form="torch"),
    "rank files, buckets, tp 2, pp 2": CoreJob("llama tied", tensor=2, pipeline=2, form="torch", **BUCKETS),
}
LOSS_SCALE = {
    "loss_scale": 256.0,
    "loss_scale_steps_since_change": STEPS,
    "loss_scale_overflows_left": 2,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("megatron-core")
    command = [sys.executable, "-m", "tests.support.megatron_core_run", str(folder), as_json(JOBS)]
    # torch.compile, by which megatron-core fuses, cannot build in a clone below a folder with a space.
    environ = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    yield folder


def states_of(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    with CheckpointReader(checkpoint) as reader:
        return {
            key: {name: reader.read(key, name, full_slice(entry.shape)) for name, entry in tensors.items()}
            for key, tensors in reader.manifest.tensors.items()
        }


def in_their_layout(done: Imported, job: CoreJob, tp: int, pp: int) -> dict[str, dict[str, Tensor]]:
    """Their state -> a rank's tensors, cut by the writer of the tests."""
    how = Written(job.tensor, job.pipeline, names="local", padded=PADDED)
    states = states_of(done.checkpoint)
    return {
        key: chunk_of(done.shape, states[WEIGHT if key == "param" else key], how, tp, pp, 0)
        for key in ("param", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("name", JOBS)
def test_masters_and_moments_are_those_of_the_program(runs: Path, tmp_path: Path, name: str) -> None:
    job = JOBS[name]
    done = import_folder(runs / name, tmp_path / "run")
    assert (done.shape, done.step, done.dtype) == (SHAPES[job.kind], STEPS, torch.float32)
    for path in runs.glob(f"{name}/truth-*.pt"):
        tp, pp, _ = map(int, path.stem.split("-")[1:])
        ours = in_their_layout(done, job, tp, pp)
        for parameter, truth in torch.load(path).items():
            start, stop = truth["part"] or (0, prod(truth["shape"]))
            if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
                rows = min(done.shape.vocab_size - tp * PADDED // job.tensor, PADDED // job.tensor)
                stop = min(stop, rows * done.shape.hidden_size)
            for key in ours:
                expected, actual = truth[key][: stop - start], ours[key][parameter].flatten()[start:stop]
                assert torch.equal(actual, expected), f"{key} of {parameter}"
    with CheckpointReader(done.checkpoint) as reader:
        manifest = reader.manifest
    assert manifest.trainer_state == {
        "step": STEPS,
        "samples": STEPS * SEQUENCES,
        "tokens": STEPS * SEQUENCES * LENGTH,
        "skipped_steps": 0,
    }
    assert manifest.optimizer == {"step": STEPS} | (LOSS_SCALE if job.dtype == "float16" else {})
    expected_settings = {"learning_rate": 1e-2, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    assert expected_settings.items() <= manifest.config["optimizer"].items()


def further_steps(job: Job, checkpoint: str) -> list[tuple[float, float]]:
    """Resume on this rank and train on; return loss and gradient norm of two steps."""
    parts = build(job)
    load_checkpoint(Path(checkpoint), parts.replica, parts.optimizer.state)
    seen = []
    for step in range(STEPS, STEPS + 2):
        rows = tokens(step)
        batch = StepBatch(
            rows[:, :-1].contiguous(),
            torch.arange(LENGTH).repeat(SEQUENCES, 1),
            rows[:, 1:].contiguous(),
            torch.ones(SEQUENCES, LENGTH),
            torch.arange(SEQUENCES),
        )
        seen.append((parts.accumulate(batch), float(parts.update(job.learning_rate).grad_norm)))
    return seen


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2)], ids=["alone", "tp 2, pp 2"])
@pytest.mark.parametrize("name", ["float32", "float32, buckets, tp 2, pp 2"])
def test_two_more_steps_are_those_of_the_program(
    runs: Path, tmp_path: Path, ranks: RankPool, name: str, layout: Layout
) -> None:
    # Megatron-LM's softmax is over the rows of padding too.
    done = import_folder(runs / name, tmp_path / "run", vocab_size=PADDED)
    settings = OptimizerConfig(
        learning_rate=ADAM["lr"],
        betas=(ADAM["adam_beta1"], ADAM["adam_beta2"]),
        eps=ADAM["adam_eps"],
        weight_decay=ADAM["weight_decay"],
        gradient_clipping=CLIP,
    )
    job = Job(
        done.shape,
        layout,
        micro_batch_size=8 // SEQUENCES,
        optimizer=OptimizerSettings(settings),
        learning_rate=ADAM["lr"],
        dtype=torch.float32,
    )
    expected = torch.tensor(torch.load(runs / name / "next.pt"))
    for seen in ranks.run(further_steps, layout.world_size, job=job, checkpoint=str(done.checkpoint)):
        assert_close(torch.tensor(seen), expected, rtol=FLOAT32_RTOL)


def test_the_export_has_the_logits_of_the_program(runs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = import_folder(runs / "float32", tmp_path / "run")
    export(ExportedWeights([done.checkpoint], None, None), tmp_path / "export", None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    expected = torch.load(runs / "float32" / "logits.pt")[..., : done.shape.vocab_size]
    with torch.no_grad():
        assert_close(model(tokens(0)[:, :-1]).logits, expected, rtol=FLOAT32_RTOL)
