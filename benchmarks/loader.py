"""Time that a training step waits for its batch: with and without a loader thread, from a cold and a warm file.

    python -m benchmarks.loader [--megabytes 256] [--quick]

The trainer of `megalite train` on one process with two threads, over a token file of random ids, shuffled; each case in
a process of its own. Cold: the kernel was asked to forget the file (posix_fadvise), so that each sample is read from
the disk; warm: it was just read. Two models: the 17M Llama of the other benchmarks at batch 4 x 256, and one so small
that its step is little but data, at 64 x 256. The first step, which finds nothing read ahead, is left out.

waiting      the sum of data_seconds over that of step_seconds, as metrics.jsonl has them.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.ranks import run_ranks
from benchmarks.workload import SEQUENCE_LENGTH, SHAPE
from megalite.data.files.token_file import TokenWriter, bin_path, idx_path

MB = 10**6
IDS = 256  # in the token file; a larger vocabulary would be most of the tiny model's step
DOCUMENT_TOKENS = 1000
MODELS = {
    "17M": (
        SHAPE.hidden_size,
        SHAPE.intermediate_size,
        SHAPE.num_hidden_layers,
        SHAPE.num_attention_heads,
        SHAPE.vocab_size,
        4,
        12,
    ),
    "tiny": (32, 64, 1, 2, IDS, 64, 30),
}
"""Name -> sizes of the model and its vocabulary, sequences of a batch, and steps."""


@dataclass(frozen=True)
class Case:
    model: str
    workers: int
    cold: bool


def write_tokens(prefix: Path, megabytes: int) -> None:
    ids = np.random.default_rng(0)
    with bin_path(prefix).open("wb") as bin_file, idx_path(prefix).open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        for _ in range(megabytes * MB // (2 * DOCUMENT_TOKENS)):
            writer.add(ids.integers(0, IDS, DOCUMENT_TOKENS, dtype=np.uint16))
            writer.end_document()
        writer.finish()
        writer.close()


def forget(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(case: Case, prefix: Path, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and those that it waited for its batch."""
    import torch

    from megalite.config.load import load_run
    from megalite.data.batches.blend import SampleOrder
    from megalite.data.batches.loader import BatchShare, StepLoader
    from megalite.data.files.token_file import TokenFile
    from megalite.parallel.mesh import ParallelMesh
    from megalite.train.step.train_step import TrainStep

    torch.set_num_threads(2)
    hidden, intermediate, layers, heads, vocabulary, sequences, _ = MODELS[case.model]
    values = {
        "model.vocab_size": vocabulary,
        "model.hidden_size": hidden,
        "model.intermediate_size": intermediate,
        "model.num_hidden_layers": layers,
        "model.num_attention_heads": heads,
        "training.steps": steps,
        "training.precision": "fp32",
        "training.sequence_length": SEQUENCE_LENGTH,
        "training.micro_batch_size": sequences,
        "training.micro_batches": 1,
        "tokenizer.path": "none is needed",
        "data.source": str(prefix),
        "data.loader_workers": case.workers,
    }
    config = load_run(
        None, [word for key, value in values.items() for word in (f"--{key}", str(value))]
    ).config
    if case.cold:
        forget(bin_path(prefix))
    else:
        bin_path(prefix).read_bytes()
    loader = StepLoader(
        TokenFile.open(prefix),
        BatchShare(SEQUENCE_LENGTH, micro_batch_size=sequences, micro_batches=1),
        SampleOrder(seed=0),
    )
    trainer = TrainStep(config, ParallelMesh.single(), config.model.shape(vocabulary), loader)
    with trainer.batches:
        reports = [trainer.train_step() for _ in range(steps)][1:]
    return [each.step_seconds for each in reports], [each.data_seconds for each in reports]


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of the token file")
    options = report.arguments_of(parser)
    facts = report.machine()
    megabytes = 4 if options.quick else options.megabytes
    rows = []
    with tempfile.TemporaryDirectory() as name:
        prefix = Path(name) / "tokens"
        write_tokens(prefix, megabytes)
        for model in ("tiny",) if options.quick else MODELS:
            *_, sequences, steps = MODELS[model]
            for cold in (True, False):
                for workers in (0, 1):
                    case = Case(model, workers, cold)
                    [(step, data)] = run_ranks(measure, 1, case, prefix, 3 if options.quick else steps)
                    rows.append(
                        {
                            "model": model,
                            "batch": f"{sequences} x {SEQUENCE_LENGTH}",
                            "file": "cold" if cold else "warm",
                            "loader_workers": workers,
                            "median_step_ms": round(1000 * statistics.median(step), 2),
                            "median_data_ms": round(1000 * statistics.median(data), 3),
                            "longest_data_ms": round(1000 * max(data), 3),
                            "waiting_percent": round(100 * sum(data) / sum(step), 3),
                        }
                    )
    columns = {"model": "model", "batch": "batch", "file": "file", "loader_workers": "workers"}
    columns |= {
        "median_step_ms": "step, ms",
        "median_data_ms": "wait, ms",
        "longest_data_ms": "longest wait, ms",
    }
    report.show("what a step waits for its data", rows, columns | {"waiting_percent": "% of the steps"})
    settings = {"quick": options.quick, "megabytes": megabytes, "threads": 2}
    report.write("loader", facts, settings, rows, options.results)


if __name__ == "__main__":
    main()
