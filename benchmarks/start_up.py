"""Seconds from the command to the end of the first step on eight local ranks, beside torchrun and deepspeed.

    python -m benchmarks.start_up [--rounds 3] [--quick]

The model of examples/quickstart on a prepared token file, two sequences of 128 tokens per rank, float32, one thread per
rank. Every contender of every round is a fresh command; rounds alternate between the contenders. Peers are scripts as
users write them (benchmarks/start_up_peer.py): transformers' Llama under torchrun with DDP, and under the deepspeed
launcher with ZeRO 1. DeepSpeed's operators are built before.

seconds        from the start of the command to the line of the first step: median of the rounds.
over megalite  the same over megalite's in the same comparison and round: median, low and high. Above 1, megalite is
               ahead.
MiB            proportional set size (PSS) of all processes of the command after the first step: shared pages once.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.peers.preparation import build_deepspeed_operators
from benchmarks.ranks import run_fresh_ranks
from benchmarks.start_up_model import MODEL, SEQUENCE_LENGTH, SEQUENCES_PER_RANK
from megalite.data.files.token_file import TokenWriter
from megalite.launcher.process import parent_of

RANKS = 8
TOKENS = 4_000_000
TRAINING = {
    "training.precision": "fp32",
    "training.steps": 1000,
    "training.sequence_length": SEQUENCE_LENGTH,
    "training.micro_batch_size": SEQUENCES_PER_RANK,
    "training.global_batch_size": RANKS * SEQUENCES_PER_RANK,
    "training.threads": 1,
    "monitor.every": 1,
}
# As a user on this machine would set it for a peer.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
COLUMNS = {
    "comparison": "comparison",
    "contender": "contender",
    "seconds": "seconds",
    "over_megalite": "over megalite",
    "low": "low",
    "high": "high",
    "mib": "MiB",
}
_PEER = "benchmarks.start_up_peer"
_MOST_SECONDS = 300


@dataclass(frozen=True)
class Contender:
    """A command. settings: megalite's; words: a peer's, before the token file."""

    comparison: str
    name: str
    settings: Mapping[str, object] | None = None
    words: Sequence[str] = ()

    def command(self, folder: Path) -> list[str]:
        """Return the command. folder: the token file's; a new run folder is made in it."""
        if self.settings is None:
            return [sys.executable, *self.words, str(folder / "text.bin")]
        model = {f"model.{name}": value for name, value in MODEL.items()}
        places = {"data.source": folder / "text", "run.folder": tempfile.mkdtemp(dir=folder)}
        flags = {**model, **TRAINING, **places, **self.settings}
        written = [word for name, value in flags.items() for word in (f"--{name}", _written(value))]
        return [sys.executable, "-m", "megalite", "train", *written]


CONTENDERS = (
    Contender("data 8", "megalite", {"parallel.data": 8}),
    Contender(
        "data 8",
        "megalite, tensor 2 x pipeline 2 x data 2",
        {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.data": 2},
    ),
    Contender(
        "data 8",
        "torchrun, DDP",
        words=["-m", "torch.distributed.run", "--nproc-per-node", "8", "-m", _PEER, "ddp"],
    ),
    Contender("ZeRO 1, data 8", "megalite", {"parallel.data": 8, "deepspeed.zero_optimization.stage": 1}),
    Contender(
        "ZeRO 1, data 8",
        "deepspeed",
        words=["-m", "deepspeed.launcher.runner", "--num_gpus", "8", "--module", _PEER, "zero"],
    ),
)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_tokens(folder: Path) -> None:
    """Write random ids as folder/text.bin and folder/text.idx."""
    with (folder / "text.bin").open("wb") as bin_file, (folder / "text.idx").open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        writer.add(np.random.default_rng(0).integers(0, MODEL["vocab_size"], TOKENS))
        writer.end_document()
        writer.finish()
        writer.close()


def first_step(command: Sequence[str]) -> tuple[float, int]:
    """Return the seconds to the end of the first step and the bytes (PSS) of all processes then; end the command.

    Raises RuntimeError with the output of a command that makes no step.
    """
    began = time.monotonic()
    environ = {**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=environ,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = []
    try:
        for line in process.stdout:
            output.append(line)
            if line.startswith("step"):
                return time.monotonic() - began, sum(map(_pss_bytes, _descendants(process.pid)))
            if time.monotonic() - began > _MOST_SECONDS:
                break
        raise RuntimeError(f"no step by {' '.join(command)}:\n{''.join(output)[-3000:]}")
    finally:
        for each in _descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _descendants(process: int) -> list[int]:
    """Return the process and all that descend from it."""
    parents = {int(entry.name): parent_of(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _pss_bytes(process: int) -> int:
    """Return the proportional set size of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def rows_of(
    contenders: Sequence[Contender], rounds: Sequence[Sequence[tuple[float, int]]]
) -> list[dict[str, Any]]:
    """One row for each contender. over_megalite: its seconds by those of the first row of its comparison."""
    rows = []
    comparisons = [each.comparison for each in contenders]
    for place, each in enumerate(contenders):
        ours = comparisons.index(each.comparison)
        seconds, sizes = zip(*(found[place] for found in rounds), strict=True)
        ratios = [found[place][0] / found[ours][0] for found in rounds]
        rows.append(
            {
                "comparison": each.comparison,
                "contender": each.name,
                "seconds": round(statistics.median(seconds), 2),
                "over_megalite": round(statistics.median(ratios), 2),
                "low": round(min(ratios), 2),
                "high": round(max(ratios), 2),
                "mib": round(statistics.median(sizes) / 2**20),
                "round_seconds": [round(one, 2) for one in seconds],
            }
        )
    return rows


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = report.arguments_of(parser)
    contenders = [each for each in CONTENDERS if not arguments.quick or each.comparison == "data 8"]
    rounds: list[list[tuple[float, int]]] = []
    facts = report.machine()
    if not arguments.quick:
        # On a user's machine DeepSpeed builds its collectives once; a rank killed at that would leave a lock behind.
        os.environ.update(ENVIRONMENT)
        run_fresh_ranks(build_deepspeed_operators, 1)
    with tempfile.TemporaryDirectory(prefix="megalite-start-up-") as folder:
        write_tokens(Path(folder))
        for _ in range(1 if arguments.quick else arguments.rounds):
            rounds.append([first_step(each.command(Path(folder))) for each in contenders])
            rows = rows_of(contenders, rounds)
            settings = {"quick": arguments.quick, "rounds": len(rounds), "ranks": RANKS}
            report.write("start-up", facts, settings, rows, arguments.results)
            report.show(f"From the command to the first step, {len(rounds)} rounds", rows, COLUMNS)


if __name__ == "__main__":
    main()
