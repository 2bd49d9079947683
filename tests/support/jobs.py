"""Real jobs of the command line: a tiny run file and corpus, the processes of a job, and their records."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megalite.checkpoint.folder import find_latest
from megalite.verify.chaos import equality
from tests.support.tiny import tiny_corpus

ROOT = Path(__file__).parents[2]
# Two checkpoints.
SIX_STEPS = ("--training.steps", "6")
RUN_FILE = """
[model]
vocab_size = "auto"
hidden_size = 32
intermediate_size = 56
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true
residual_dropout = 0.1

[parallel]
tensor = {tensor}
pipeline = {pipeline}
data = {data}

[training]
steps = 12
precision = "fp32"
sequence_length = 32
micro_batch_size = 1
global_batch_size = 8
threads = 1

[optimizer]
learning_rate = 5e-3
warmup_steps = 2

[deepspeed.zero_optimization]
stage = 1

[tokenizer]
vocab_size = 300

[data]
source = "{corpus}"

[checkpoint]
every = 3
export = false
"""


@dataclass(frozen=True)
class Job:
    """A run file, and the command that trains it into a new folder."""

    run_file: Path

    @classmethod
    def write(cls, folder: Path, *, tensor: int = 2, pipeline: int = 2, data: int = 1) -> "Job":
        corpus = folder / "corpus.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny_corpus(200)))
        run_file = folder / "run.toml"
        run_file.write_text(RUN_FILE.format(tensor=tensor, pipeline=pipeline, data=data, corpus=corpus))
        return cls(run_file)

    def command(self, run_folder: Path, *flags: str, name: str = "train") -> list[str]:
        return [sys.executable, "-m", "megalite", name, *self.arguments(run_folder, *flags)[1:]]

    def arguments(self, run_folder: Path, *flags: str) -> list[str]:
        return ["train", str(self.run_file), "--run.folder", str(run_folder), *flags]

    def start(self, run_folder: Path, *flags: str, name: str = "train") -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(run_folder, *flags, name=name),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, run_folder: Path, *flags: str, timeout: float = 240) -> str:
        """Train to the end and return the job's output; if the job fails, fail with the output."""
        process = self.start(run_folder, *flags)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == 0, output
        return output


def running(processes: list[int]) -> list[int]:
    """Return the processes that still run; zombies do not count."""
    alive = []
    for process in processes:
        try:
            os.kill(process, 0)
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.append(process)
    return alive


curve = equality.curve


def tensor_hashes(run_folder: Path) -> dict[tuple[str, ...], str]:
    """Return the hash of every shard of a run's latest checkpoint."""
    checkpoint = find_latest(run_folder / "checkpoints")
    assert checkpoint is not None
    return {(checkpoint.name, *shard): digest for shard, digest in equality.tensor_hashes(checkpoint).items()}


@contextmanager
def training_here() -> Iterator[None]:
    """Isolate process-wide settings of training from other tests; skip measuring the machine's speed."""
    import torch

    from megalite.train import report

    environment, threads = dict(os.environ), torch.get_num_threads()
    with mock.patch.object(report, "gemm_flops_per_second", lambda _: 1e12):
        yield
    torch.set_num_threads(threads)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
