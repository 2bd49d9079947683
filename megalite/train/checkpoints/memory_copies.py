"""The copies of a run in its hosts' memory: taken every few steps, found at a restart, removed at the end."""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.checkpoint.background import BackgroundWriter
from megalite.checkpoint.copies_folder import SHARED_MEMORY, CopiesFolder, copies_name, forget_copies
from megalite.checkpoint.durable import write_durably
from megalite.checkpoint.failures import explain
from megalite.checkpoint.folder import published_name, read_manifest
from megalite.checkpoint.in_memory import MemoryDraft, WholeCopy, whole_copies
from megalite.checkpoint.load import files_needed
from megalite.checkpoint.manifest import MANIFEST
from megalite.checkpoint.manifest_json import to_json
from megalite.checkpoint.save import RunRecord, listed_state
from megalite.checkpoint.unpublished import Draft
from megalite.config.sections.schema import RunConfig
from megalite.errors import CheckpointError
from megalite.launcher.control.progress import Activity, progress
from megalite.model.replica import Replica
from megalite.parallel.host_ring import HostRing, copy_to_rank
from megalite.parallel.mesh import ParallelMesh, all_or_none
from megalite.topology.state import OptimizerState

if TYPE_CHECKING:
    from megalite.train.step.train_step import TrainStep


class MemoryCopies:
    """The copies of one start of a run; one object a rank, called alike on every rank."""

    def __init__(self, config: RunConfig, mesh: ParallelMesh, node: str, checkpoints: Path):
        """node: the name of this rank's host. Collective. Raises CheckpointError where a host refuses copies."""
        self._config, self._mesh, self._checkpoints = config, mesh, checkpoints
        new = config.checkpoint.resume == "never"
        name = mesh.broadcast_object(copies_name(checkpoints, new=new) if mesh.rank == 0 else None)
        self._hosts: Sequence[str] = mesh.broadcast_object(mesh.gather_objects(node))
        # The first rank of each host, which tidies there.
        self._leader = self._hosts.index(node)
        self.folder = CopiesFolder(SHARED_MEMORY / name)
        claim = partial(self.folder.claim, checkpoints) if self._leads else lambda: None
        all_or_none(mesh, claim, str)
        seconds = config.launch.collective_seconds
        self._ring = HostRing(self._hosts, mesh.rank, seconds) if len(set(self._hosts)) > 1 else None
        self._start = mesh.broadcast_object(secrets.token_hex(8))
        self._writer, self._stall_seconds = BackgroundWriter(mesh), 0.0
        self._holders: dict[str, Sequence[int]] = {}
        self._failed = False
        self.unsaved = False
        """Whether the run goes on from a copy, and no checkpoint has been saved since."""

    @property
    def _leads(self) -> bool:
        return self._leader == self._mesh.rank

    def newest(self, saved: Path | None) -> Path | None:
        """Return the folder of the newest whole copy, if it is newer than the checkpoint `saved`. Collective.

        It has the manifest on every host, and the files that the host has kept: `fetch` brings others.
        """
        if self._config.checkpoint.resume != "auto":
            self._keep()
            return None
        found = self._mesh.gather_objects(self.folder.notes() if self._leads else None)
        chosen: WholeCopy | None = self._mesh.broadcast_object(
            None if found is None else self._choice(found, saved)
        )
        if chosen is None:
            self._keep()
            return None
        path, self._holders = self.folder.step(chosen.manifest.step), dict(chosen.holders)
        if self._leads:
            path.mkdir(exist_ok=True)
            write_durably(path / MANIFEST, to_json(chosen.manifest))
        self._mesh.barrier()
        return path

    def _choice(self, found: Sequence[Any], saved: Path | None) -> WholeCopy | None:
        after = -1 if saved is None else read_manifest(saved).step
        notes = {rank: notes for rank, notes in enumerate(found) if notes is not None}
        for copy in whole_copies(notes):
            best = copy.manifest.trainer_state.get("best_step")
            # A checkpoint that was not published before the end must be made again.
            named = self._config.checkpoint.best and best is not None
            lacks_best = named and not (self._checkpoints / published_name(best or 0)).is_dir()
            if copy.manifest.step > after and not lacks_best:
                return copy
        return None

    def fetch(self, trainer: "TrainStep", path: Path) -> None:
        """Bring the files of the copy that the ranks of this host need, and another host has. Collective."""
        needed = files_needed(path, trainer.replica, trainer.optimizer.state)
        missing = {name for name in needed if not (path / name).is_file()}
        asked = self._mesh.gather_objects((self._leader, missing)) or []
        wanted = sorted({(name, leader) for leader, names in asked for name in names})
        plan = [(name, self._holders[name][0], leader) for name, leader in wanted if name in self._holders]

        def bring() -> None:
            failures = []
            for name, source, target in self._mesh.broadcast_object(plan):
                try:
                    copy_to_rank(self._mesh, path / name, source, target)
                except OSError as error:  # later files may be of this rank too, and another waits with them
                    failures.append(error)
            if failures:
                raise failures[0]

        all_or_none(self._mesh, bring, explain(self._mesh, "fetch", path))

    def resumed(self, step: int | None) -> None:
        """Remove all other copies: the run goes on from that of `step`, or from none. Collective."""
        self._keep(*(() if step is None else (step,)))
        self._mesh.barrier()
        self.unsaved = step is not None

    def due(self, step: int) -> bool:
        return not self._failed and step % self._config.checkpoint.in_memory_every == 0

    def settle(self) -> str:
        """Wait until the copy under way is whole, and remove the one before; return why there will be none. Collective.

        Called before a step with the next copy counts as done, so that no more than `in_memory_every` steps are lost.
        """
        started = time.perf_counter()
        progress.begin(Activity.SAVING)
        try:
            written = self._writer.finish()
        except CheckpointError as error:
            return self._give_up(error)
        if written is not None:
            self._keep(written.step)
        progress.begin(Activity.BETWEEN_STEPS)
        self._stall_seconds += time.perf_counter() - started
        return ""

    def take(self, trainer: "TrainStep") -> str:
        """Begin to copy the state of this moment; return why there will be no copies. Collective; after `settle`."""
        started = time.perf_counter()
        try:
            self._writer.start(trainer.draft(self.folder.root, self._draft), lambda: None)
        except CheckpointError as error:
            return self._give_up(error)
        self._stall_seconds += time.perf_counter() - started
        return ""

    def before_update(self) -> None:
        """Wait until the copy under way no longer reads the state."""
        started = time.perf_counter()
        self._writer.before_update()
        self._stall_seconds += time.perf_counter() - started

    def stall_seconds(self) -> float:
        """Return for how long training has waited since the last call."""
        seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def drop(self) -> None:
        """Remove all copies, also one that is being written: no later start finds it."""
        self._failed = True
        if self._mesh.rank == 0:
            forget_copies(self._checkpoints)
        if self._leads:
            self.folder.remove()

    def close(self) -> None:
        """Remove the copies of a run whose last step is saved. Collective."""
        if not self._failed:
            self.settle()
        self.drop()

    def _give_up(self, error: CheckpointError) -> str:
        self.drop()
        return f"no more copies in memory (checkpoint.in_memory_every): {error}"

    def _keep(self, *steps: int) -> None:
        if self._leads:
            self.folder.keep(*steps)

    def _draft(self, folder: Path, replica: Replica, optimizer: OptimizerState, record: RunRecord) -> Draft:
        pieces, manifest = listed_state(folder, replica, optimizer, record)
        where = self.folder.step(manifest.step)
        return MemoryDraft(self._start, self._ring, where, where, self._mesh.rank, pieces, manifest)


def memory_copies(config: RunConfig, mesh: ParallelMesh, node: str, checkpoints: Path) -> MemoryCopies | None:
    """Return the copies of a run that takes them; a run that does not forgets those of earlier starts. Collective."""
    if config.checkpoint.in_memory_every:
        return MemoryCopies(config, mesh, node, checkpoints)
    if mesh.rank == 0:
        forget_copies(checkpoints)
    return None
