"""A run's whole life on an accelerator through the command line: train, validate, save, resume, export, generate.

On the stand-in it gives the numbers of the CPU, to the bit, though every tensor of a step lies on a device whose memory
the host cannot read.
"""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megalite.launcher.control.progress import Activity
from megalite.planner.traces import read_step
from tests.support.device_branches import ON_THE_STANDIN
from tests.support.jobs import ROOT, Job, curve, tensor_hashes
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.support.standin import build
from tests.support.tiny import tiny_corpus

SETTINGS = (
    *("--model.kernels", "reference", "--model.attention_dropout", "0.1", "--data.document_mask", "true"),
    *(
        "--checkpoint.every",
        "1",
        "--checkpoint.best",
        "true",
        "--validation.every",
        "2",
        "--data.split",
        "[0.8, 0.2]",
    ),
    *("--optimizer.decay_steps", "4", "--optimizer.warmup_steps", "1", "--monitor.trace_steps", "[2]"),
    *("--monitor.profile_steps", "[2]", "--monitor.profile_ranks", "[1]"),
)
PROMPT = (
    *("--prompt", "the tensor waits for", "--tokens", "8"),
    *("--temperature", "0.7", "--top-p", "0.9"),
    *("--dtype", "float32"),
)


def command(module: str, *arguments: str, record: Path | None = None) -> str:
    """What `python -m module arguments` prints."""
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | ({} if record is None else {"RECORD": str(record)}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job.write(tmp_path_factory.mktemp("job"), tensor=1, pipeline=1, data=2)
    text = job.run_file.read_text().replace("[deepspeed.zero_optimization]\nstage = 1\n", "")
    job.run_file.write_text(text.replace("export = false", "export = true"))
    return job


def check_trace(folder: Path, device: str) -> None:
    """The stamps of an accelerator are in the order of its work too."""
    for rank in read_step(folder, 2).ranks:
        spans = sorted(rank.actions, key=lambda span: span.start)
        assert rank.device == device and [*spans] == [*rank.actions]
        assert all(one.start < one.end <= other.start for one, other in pairwise(spans))
        forward = next(phase for phase in rank.phases if phase.name == Activity.FORWARD_BACKWARD.value)
        assert forward.start <= spans[0].start and spans[-1].end <= forward.end


@pytest.mark.extended
def test_a_run_on_an_accelerator_is_the_run_on_the_cpu(job: Job, tmp_path: Path) -> None:
    build.load()
    on_cpu, on_device, record = tmp_path / "cpu", tmp_path / "device", tmp_path / "called"

    def train(module: str, folder: Path, steps: int) -> str:
        flags = [*SETTINGS, "--training.steps", str(steps)]
        return command(module, *job.arguments(folder, *flags), record=record)

    train("megalite", on_cpu, 4)
    train("tests.support.standin", on_device, 2)
    said = train("tests.support.standin", on_device, 4)
    assert "resumed after step 2" in said
    assert {file.name for file in (on_device / "profiles" / "step-000002").iterdir()} == {
        f"rank-00001.{end}" for end in ("memory.txt", "operators.txt", "trace.json.gz")
    }
    assert curve(on_device) == curve(on_cpu)
    assert tensor_hashes(on_device) == tensor_hashes(on_cpu)
    for folder, device in ((on_cpu, "cpu"), (on_device, "standin")):
        check_trace(folder, device)
    exported = [folder / "export" / "model.safetensors" for folder in (on_cpu, on_device)]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    told = [
        command(module, "generate", str(on_device), *PROMPT, record=record)
        for module in ("megalite", "tests.support.standin")
    ]
    assert told[0] == told[1]
    (tmp_path / "text.txt").write_text("".join(tiny_corpus(6)))
    text = (
        "--data",
        str(tmp_path / "text.txt"),
        "--tensor",
        "2",
        "--data-parallel",
        "2",
        "--dtype",
        "float32",
    )
    measured = [
        command(module, "evaluate", str(on_device), *text, record=record)
        for module in ("megalite", "tests.support.standin")
    ]
    # The CPU's operators are compiled ones, the device's torch's.
    numbers = [
        [float(each.replace(",", "")) for each in re.findall(r" +([\d,]+\.\d+)$", said, re.M)]
        for said in measured
    ]
    assert "word perplexity" in measured[0] and len(numbers[0]) > 3
    assert_close(numbers[1], numbers[0], rtol=FLOAT32_RTOL)
    said = command("tests.support.standin", "doctor", record=record)
    assert re.search(r"GPU 7 +stand-in, \d+ GiB", said) and re.search(r"collectives +standin", said)
    assert "norm not tested yet: torch computes it" in re.sub(" +", " ", said)
    called = {line for path in tmp_path.glob("called.*") for line in path.read_text().splitlines()}
    assert not ON_THE_STANDIN - called, "these hold device branches, and were not called on the device"
