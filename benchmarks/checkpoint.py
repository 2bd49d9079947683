"""Saving and loading a checkpoint against the disk's own speed; what training waits for a save, and what it slows.

    python -m benchmarks.checkpoint [--folder FOLDER] [--quick]

The trainer of `megalite train` with the 17M Llama of the other benchmarks (203 MB of weights and AdamW's moments), on
one process with two threads, and on two ranks (data 2) with one each. In rounds, of which the medians are shown: the
disk by itself (a file of as many bytes, in pieces of 16 MiB, written until fsync returns, and read after the kernel was
asked to forget it), sha256 by itself, a save that training waits for, one beside it with the steps that it takes, and a
load of what was saved, forgotten too.

stall        what training waits for a save beside it, all in all: agreement, listing, and what of the copy is not done
             when the first step wants to update; also as a share of the save that it waits for.
slowdown     a step while a save is written beside it, as a multiple of one without.
cost         by how much a save beside the training makes it end later: the stall, and what the steps take longer.
staging      the copy in memory, of a rank; held from the first save to the end of the run.
DCP          on one rank: torch.distributed.checkpoint loads the same tensors from its own save in the same rounds, and
             checks no hash. As a multiple of megalite's seconds: from the disk, and from memory.
"""

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.loader import forget
from benchmarks.ranks import run_ranks
from benchmarks.workload import SEQUENCE_LENGTH, SEQUENCES, SHAPE, token_ids

MB = 10**6
PIECE_BYTES = 16 << 20
WARM_UP_STEPS, ALONE_STEPS = 2, 6


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        for start in range(0, len(data), PIECE_BYTES):
            file.write(memoryview(data)[start : start + PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(PIECE_BYTES):
            pass


def trainer_of(ranks: int, steps: int) -> Any:
    """The 17M Llama's, over `ranks` data-parallel ranks, on one batch of random ids."""
    import torch

    from megalite.config.load import load_run
    from megalite.parallel.mesh import ParallelMesh
    from megalite.parallel.step_batch import StepBatch
    from megalite.train.step.train_step import TrainStep

    values = {
        "model.vocab_size": SHAPE.vocab_size,
        "model.hidden_size": SHAPE.hidden_size,
        "model.intermediate_size": SHAPE.intermediate_size,
        "model.num_hidden_layers": SHAPE.num_hidden_layers,
        "model.num_attention_heads": SHAPE.num_attention_heads,
        "model.tie_word_embeddings": "true",
        "parallel.data": ranks,
        "training.steps": steps,
        "training.precision": "fp32",
        "training.sequence_length": SEQUENCE_LENGTH,
        "training.micro_batch_size": SEQUENCES // ranks,
        "training.micro_batches": 1,
        "tokenizer.path": "none is needed",
        "data.source": "none is needed",
        "data.loader_workers": 0,
    }
    config = load_run(
        None, [word for key, value in values.items() for word in (f"--{key}", str(value))]
    ).config
    mesh = ParallelMesh.over_world(config.layout)

    class Loader:
        """The same batch again and again."""

        def step_batch(self, samples: int, dtype: torch.dtype) -> StepBatch:
            ids = token_ids()[mesh.batch.rank :: ranks]
            positions = torch.arange(SEQUENCE_LENGTH).repeat(len(ids), 1)
            weights = torch.ones(ids.shape, dtype=dtype)
            return StepBatch(ids, positions, ids.roll(-1, dims=1), weights, torch.arange(len(ids)))

    loader: Any = Loader()
    return TrainStep(config, mesh, config.model.shape(SHAPE.vocab_size), loader)


def measure(ranks: int, folder: Path, rounds: int) -> dict[str, Any]:
    """This rank's figures; those of rank 0 are those of the job."""
    import torch

    from megalite.train.checkpoints.saving import RunSaver

    torch.set_num_threads(2 // ranks)
    trainer = trainer_of(ranks, steps=100_000)
    saver, found = RunSaver(trainer, folder / f"{ranks}"), list[dict[str, float]]()

    def step() -> float:
        made = trainer.train_step(before_update=saver.before_update)
        saver.stepped(made)
        seconds: float = made.step_seconds
        return seconds

    def beside() -> Any:
        """A save, and the steps until it is published."""
        saver.save(at_once=False)
        while True:
            step()
            busy, failed = trainer.mesh.sum_over_world([float(saver.busy), float(saver.failed)])
            for saved in saver.advance(busy=bool(busy), failed=bool(failed)):
                return saved

    with trainer.batches:
        for _ in range(WARM_UP_STEPS):
            step()
        first = beside()  # its copy is the first to touch the memory
        peer = DcpPeer(trainer, folder / "dcp") if ranks == 1 else None
        for _ in range(rounds):
            row = {"step": statistics.median(step() for _ in range(ALONE_STEPS))}
            [waited] = saver.save(at_once=True)
            size_bytes = sum(path.stat().st_size for path in waited.path.iterdir())
            if trainer.mesh.rank == 0:
                row |= by_themselves(folder, size_bytes)
            trainer.mesh.barrier()
            saved = beside()
            for path in saved.path.iterdir():
                forget(path)
            row |= {
                "bytes": size_bytes,
                "save": waited.write_seconds,
                "stall": saved.stall_seconds,
                "beside": saved.write_seconds,
                "steps": saved.steps_during_write,
                "slowdown": saved.slowdown,
                "cost": saved.stall_seconds + saved.steps_during_write * (saved.slowdown - 1) * row["step"],
                "staging": saved.staging_bytes,
                "load": timed(lambda path=saved.path: trainer.resume(path)),
            }
            if peer is not None:
                row |= {"dcp": peer.load_seconds(forgotten=True)}
                row |= {"warm": timed(lambda path=saved.path: trainer.resume(path))}
                row |= {"dcp_warm": peer.load_seconds(forgotten=False)}
            found.append(row)
    medians = {key: statistics.median(row[key] for row in found) for key in found[-1]}
    return {**medians, "first_stall": first.stall_seconds}


class DcpPeer:
    """A save of a trainer's weights and optimizer state by torch.distributed.checkpoint, in one process."""

    def __init__(self, trainer: Any, folder: Path):
        import torch.distributed.checkpoint as dcp

        self._folder, self._dcp = folder, dcp
        self._tensors = {name: weight.detach() for name, weight in trainer.stage.named_parameters()}
        shards = trainer.optimizer.state.shards()
        self._tensors |= {f"{shard.key}/{shard.parameter.name}": shard.values for shard in shards}
        dcp.save(self._tensors, checkpoint_id=folder, no_dist=True)

    def load_seconds(self, *, forgotten: bool) -> float:
        if forgotten:
            for path in self._folder.iterdir():
                forget(path)
        return timed(lambda: self._dcp.load(self._tensors, checkpoint_id=self._folder, no_dist=True))


def by_themselves(folder: Path, size_bytes: int) -> dict[str, float]:
    """Seconds that the disk and the hash take for as many bytes."""
    path, data = folder / "plain", os.urandom(size_bytes)
    seconds = {
        "disk_write": timed(lambda: write_file(path, data)),
        "sha256": timed(lambda: hashlib.sha256(data)),
    }
    forget(path)
    seconds["disk_read"] = timed(lambda: read_file(path))
    path.unlink()
    return seconds


def row_of(ranks: int, found: dict[str, Any]) -> dict[str, Any]:
    def speed(key: str) -> int:
        return round(found["bytes"] / MB / found[key])

    return {
        "ranks": ranks,
        "megabytes": round(found["bytes"] / MB),
        "disk_write_mb_s": speed("disk_write"),
        "disk_read_mb_s": speed("disk_read"),
        "sha256_mb_s": speed("sha256"),
        "save_mb_s": speed("save"),
        "save_percent_of_disk": round(100 * found["disk_write"] / found["save"]),
        "beside_mb_s": speed("beside"),
        "load_mb_s": speed("load"),
        "load_percent_of_disk": round(100 * found["disk_read"] / found["load"]),
        "load_ms": round(1000 * found["load"]),
        "dcp_ratio": round(found["dcp"] / found["load"], 2) if "dcp" in found else None,
        "dcp_ratio_warm": round(found["dcp_warm"] / found["warm"], 2) if "dcp" in found else None,
        "save_ms": round(1000 * found["save"]),
        "step_ms": round(1000 * found["step"]),
        "stall_ms": round(1000 * found["stall"], 1),
        "first_stall_ms": round(1000 * found["first_stall"], 1),
        "stall_percent_of_save": round(100 * found["stall"] / found["save"], 1),
        "beside_ms": round(1000 * found["beside"]),
        "steps_beside": found["steps"],
        "slowdown": round(found["slowdown"], 2),
        "cost_ms": round(1000 * found["cost"]),
        "staging_mib": round(found["staging"] / 2**20),
    }


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: that of temporary files"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = report.arguments_of(parser)
    facts = report.machine()
    rounds, rows = 1 if options.quick else options.rounds, []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for ranks in (1,) if options.quick else (1, 2):
            found, *_ = run_ranks(measure, ranks, ranks, Path(name), rounds)
            rows.append(row_of(ranks, found))
    speeds = {
        "ranks": "ranks",
        "megabytes": "MB",
        "disk_write_mb_s": "disk write, MB/s",
        "save_mb_s": "save, MB/s",
    }
    speeds |= {
        "save_percent_of_disk": "% of disk",
        "beside_mb_s": "save beside, MB/s",
        "sha256_mb_s": "sha256, MB/s",
    }
    speeds |= {
        "disk_read_mb_s": "disk read, MB/s",
        "load_mb_s": "load, MB/s",
        "load_percent_of_disk": "% of disk",
        "load_ms": "load, ms",
        "dcp_ratio": "DCP / load",
        "dcp_ratio_warm": "from memory",
    }
    report.show("throughput", rows, speeds)
    stalls = {"ranks": "ranks", "save_ms": "save, ms", "step_ms": "step, ms", "stall_ms": "stall, ms"}
    stalls |= {"first_stall_ms": "first, ms", "stall_percent_of_save": "% of save", "beside_ms": "beside, ms"}
    stalls |= {
        "steps_beside": "steps beside",
        "slowdown": "slowdown",
        "cost_ms": "cost, ms",
        "staging_mib": "staging, MiB a rank",
    }
    report.show("what training waits for a save, and what it slows", rows, stalls)
    settings = {"quick": options.quick, "rounds": rounds, "threads": 2}
    report.write("checkpoint", facts, settings, rows, options.results)


if __name__ == "__main__":
    main()
