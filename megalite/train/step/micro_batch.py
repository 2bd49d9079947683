"""training.micro_batch_size = "auto": the largest micro batch that fits by estimate, tried before training."""

import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megalite.checkpoint.folder import read_manifest
from megalite.config.output.summary import memory_text
from megalite.config.sections.schema import RunConfig
from megalite.errors import MemoryExhausted, TrainingError, listed
from megalite.launcher.process import available_memory_bytes
from megalite.launcher.rank.detect import RankInfo
from megalite.monitor.memory import free_bytes, process_memory
from megalite.monitor.work import working
from megalite.parallel.mesh import ParallelMesh, serve_store
from megalite.planner.fit import legal_micro_batches, micro_batch_bytes
from megalite.planner.memory import CARD_BASE_BYTES
from megalite.planner.out_of_memory import out_of_memory_lines
from megalite.planner.planned_run import PlannedRun
from megalite.train.step.trial import FULL, TrialJob

_LOOK_SECONDS = 0.2
_LOOKS_AFTER_FAILURE = 15
"""A rank that has lost another one may end before that one, which ran out of memory."""
_KEPT_FREE = 0.05
"""The share of the memory that is left for what no estimate counts."""
_SAID_BYTES = 4096


@dataclass(frozen=True)
class TrialRank:
    """A rank that tries micro batches. address: of rank 0's host, as the others reach it. threads: of torch."""

    info: RankInfo
    mesh: ParallelMesh
    address: str
    threads: int


def in_micro_batches(
    config: RunConfig,
    vocab_size: int,
    rank: TrialRank,
    plain_torch: bool,
    adapted: Path | None,
    resumed_from: Path | None,
) -> tuple[RunConfig, str]:
    """Return the run with its micro batch, the same on every rank, and why; as it is where the size is set. Collective.

    config: with its precision. plain_torch: as in PlannedRun. adapted: the weights beside an adapter.
    A run that goes on in its layout keeps its micro batch. Raises MemoryExhausted if the smallest one does not fit.
    """
    if config.training.micro_batch_size != "auto":
        return config, ""
    with working("trying micro batches", shown=rank.mesh.rank == 0, stream=sys.stdout):
        return _MicroBatchChoice(config, vocab_size, rank, plain_torch, adapted).choose(resumed_from)


@dataclass(frozen=True)
class _MicroBatchChoice:
    config: RunConfig
    vocab_size: int
    rank: TrialRank
    plain_torch: bool
    weights: Path | None

    @property
    def mesh(self) -> ParallelMesh:
        return self.rank.mesh

    def choose(self, resumed_from: Path | None) -> tuple[RunConfig, str]:
        config, mesh = self.config, self.mesh
        sizes = legal_micro_batches(config)
        before = _chosen_before(config, resumed_from) if mesh.rank == 0 and resumed_from is not None else None
        if (size := mesh.broadcast_object(before)) in sizes:
            return self._chosen(size, "as in the checkpoint")
        limit = self._limit_bytes()
        bytes_of = self._planned_bytes(sizes)
        size = max((size for size in sizes if bytes_of[size] <= limit), default=sizes[0])
        size = int(-mesh.max_over_world(-size))
        least = -mesh.max_over_world(-limit)
        failed: list[str] = []
        while (said := self._tried(size, limit)) is not None:
            if size == sizes[0]:
                raise MemoryExhausted(self._nothing_fits(size, said, least))
            failed.append(str(size))
            size = max((smaller for smaller in sizes if smaller <= size / 2), default=sizes[0])
        why = f"the largest of {listed([str(legal) for legal in sizes], 12)} that fits {memory_text(least)} a rank"
        if failed:
            why = f"{', '.join(failed)} ran out of memory when tried, of {memory_text(least)} a rank"
        return self._chosen(size, f"{why}; tried for two steps")

    def _chosen(self, size: int, why: str) -> tuple[RunConfig, str]:
        chosen = self.config.in_micro_batches(size)
        return chosen, f"micro batch {size} x {chosen.batch.micro_batches}: {why}"

    def _limit_bytes(self) -> float:
        """Return the bytes that this rank may fill."""
        asked = self.config.training.memory_limit
        if asked is not None:
            return asked * 2**30
        if (on_card := free_bytes(self.mesh.device)) is not None:
            return (1 - _KEPT_FREE) * on_card
        free = available_memory_bytes()
        return math.inf if free is None else (1 - _KEPT_FREE) * free / self.rank.info.local_world_size

    def _planned_bytes(self, sizes: list[int]) -> dict[int, float]:
        """Return size -> the peak of this rank by the planner."""
        on_cpu = self.mesh.device.type == "cpu"
        run = PlannedRun.of(self.config, self.vocab_size, on_cpu=on_cpu, plain_torch=self.plain_torch)
        base = process_memory().now_bytes if on_cpu else CARD_BASE_BYTES
        stage = self.config.layout.coordinates(self.mesh.rank).pp
        return {size: micro_batch_bytes(run, stage, size, base=base) for size in sizes}

    def _nothing_fits(self, size: int, said: str, limit: float) -> str:
        chosen, stage = self.config.in_micro_batches(size), self.config.layout.coordinates(self.mesh.rank).pp
        first = f'training.micro_batch_size = "auto": the smallest micro batch, {size}, does not fit: {said}'
        return "\n  ".join([first, *out_of_memory_lines(chosen, self.vocab_size, stage, limit)])

    def _tried(self, size: int, limit: float) -> str | None:
        """Run two steps with micro batches of `size` in processes of their own; return why they do not fit. Collective.

        None: they fit. Raises TrainingError, on every rank, if they fail for another reason.
        """
        mesh, seconds = self.mesh, self.config.launch.collective_seconds
        store, port = serve_store(self.rank.address, seconds) if mesh.rank == 0 else (None, 0)
        address, port = mesh.broadcast_object((self.rank.address, port))
        job = TrialJob(
            self.config.in_micro_batches(size).model_dump(mode="json"),
            self.vocab_size,
            None if self.weights is None else str(self.weights),
            mesh.rank,
            self.rank.info.local_rank,
            self.rank.info.local_world_size,
            self.rank.threads,
            limit,
            address,
            port,
            os.getpid(),
        )
        with tempfile.TemporaryFile() as output:
            # Ctrl-C of a terminal reaches this process alone.
            trial = subprocess.Popen(
                [sys.executable, "-m", "megalite.train.step.trial"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                assert trial.stdin is not None
                with suppress(BrokenPipeError), trial.stdin as pipe:
                    pipe.write(job.as_json().encode())
                full, failed = self._watched(trial)
                own = trial.returncode
            finally:
                trial.kill()
                trial.wait()
            said = _last_line(output)
        del store
        if not (full or failed):
            return None
        # Not of a trial that is killed here, beside another one whose memory ran out.
        counts = _is_full(own) if full else bool(own)
        causes = mesh.gather_objects(said if counts else "")
        cause: str = mesh.broadcast_object(next(filter(None, causes or []), "a process was killed"))
        if full:
            return cause
        raise TrainingError(f"the trial of training.micro_batch_size = {size} failed: {cause}")

    def _watched(self, trial: "subprocess.Popen[bytes]") -> tuple[bool, bool]:
        """Wait for the trials of all ranks; return whether memory ran out in any, and whether any failed otherwise."""
        looks = _LOOKS_AFTER_FAILURE
        while True:
            with suppress(subprocess.TimeoutExpired):
                trial.wait(_LOOK_SECONDS)
            full = _is_full(trial.returncode)
            states = (trial.returncode is None, full, bool(trial.returncode) and not full)
            running, full_ranks, failed = self.mesh.sum_over_world([float(state) for state in states])
            looks -= failed > 0
            if full_ranks or not running or looks < 0:
                return full_ranks > 0, failed > 0


def _chosen_before(config: RunConfig, checkpoint: Path) -> Any:
    """Return the micro batch of a checkpoint of the same layout and length; None if it had others."""
    written, own = read_manifest(checkpoint).config, config.model_dump(mode="json")
    same = all(
        written.get(section, {}).get(key, 1 if key in ("context", "expert") else None) == own[section][key]
        for section, key in (
            *(
                ("parallel", axis)
                for axis in (
                    *("tensor", "context", "expert", "expert_tensor", "pipeline"),
                    *("data", "sequence", "schedule"),
                )
            ),
            ("training", "sequence_length"),
            ("training", "global_batch_size"),
        )
    )
    return written["training"]["micro_batch_size"] if same else None


def _is_full(code: int | None) -> bool:
    """Return whether memory ran out in a trial with this exit code: it says so, or the kernel has killed it."""
    return code in (FULL, -signal.SIGKILL)


def _last_line(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _SAID_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
