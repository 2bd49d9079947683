"""Kills a job of two ranks with SIGKILL at random moments of its saves, and looks at what is left each time.

    python -m tests.end_to_end.kill_saves [--kills 200] [--between 50] [--seed 0] [--results benchmarks/results]

The ranks do nothing but save, resume and change every number in between; half of the jobs wait for their saves, half
save beside their training (checkpoint/background.py). A moment is uniform over a save, from before its first byte to
after the removal of an older checkpoint, as long as one was measured to take. One rank dies or both; the other one of
them up to 50 ms later, so that a rank goes on alone for a while, as in a job whose parent has not yet noticed.

After each kill: every folder that is named as a checkpoint holds, to the bit, the numbers of its step; none that was
published is gone but those that `keep_last` gives up; the next job goes on from the last, which it loads and compares.
Exit code 1 where that fails, or where fewer than `--between` of the kills came between a save's first byte and its
publishing.
"""

import argparse
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.background import BackgroundWriter
from megalite.checkpoint.folder import find_latest, read_manifest
from megalite.checkpoint.load import load_checkpoint
from megalite.checkpoint.publish import remove_older
from megalite.checkpoint.save import RunRecord, draft_checkpoint, write_draft
from megalite.launcher.process import die_with_parent
from megalite.parallel.mesh import ParallelMesh, connect
from megalite.topology.axes import Layout
from tests.support.tiny import tiny_shape
from tests.unit.checkpoint.worlds import World, truth

WORLD = World(replace(tiny_shape(layers=2), vocab_size=8191, hidden_size=64), Layout(data=2))
KEPT, EVERY = 2, 5
MODES = ("waiting", "beside")
LONGEST_ALONE_SECONDS = 0.05
START_SECONDS = 60
BEGUN, PUBLISHED, TIDIED = b"b", b"p", b"t"
"""Rank 0's messages about a save, each with its step."""


@dataclass
class Job:
    """Two ranks that save one step after the other in a folder; what rank 0 told, with the time of each."""

    folder: Path
    mode: str
    told: list[tuple[bytes, int, float]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[list[BaseProcess]]:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = os.pipe()
        with tempfile.TemporaryDirectory(prefix="megalite-kills-") as scratch:
            store = str(Path(scratch) / "store")
            arguments = (self.folder, self.mode, store, sender, os.getpid())
            ranks = [context.Process(target=be_rank, args=(rank, *arguments)) for rank in range(2)]
            for rank in ranks:
                rank.start()
            os.close(sender)
            try:
                yield ranks
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.join()
                while self.hear(0):
                    pass
                os.close(self._receiver)

    def hear(self, seconds: float) -> bool:
        """Take what rank 0 tells next, if it does within this time."""
        if not select.select([self._receiver], [], [], seconds)[0]:
            return False
        message = os.read(self._receiver, 9)
        if message:
            self.told.append((message[:1], int.from_bytes(message[1:], "little"), time.monotonic()))
        return bool(message)

    def wait_for(self, what: bytes, count: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while sum(told == what for told, *_ in self.told) < count:
            if not self.hear(deadline - time.monotonic()):
                raise AssertionError(f"the job ended or hung: {self.told[-5:]}")

    def steps(self, what: bytes) -> list[int]:
        return [step for told, step, _ in self.told if told == what]

    def save_seconds(self) -> list[float]:
        begun = {step: at for told, step, at in self.told if told == BEGUN}
        return [at - begun[step] for told, step, at in self.told if told == TIDIED]


def be_rank(rank: int, folder: Path, mode: str, store: str, sender: int, parent: int) -> None:
    """A rank's whole life, which somebody else ends."""
    die_with_parent(parent)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        save_for_ever(rank, folder, mode, store, sender)
    except RuntimeError as error:
        if "peer" not in str(error):
            raise


def save_for_ever(rank: int, folder: Path, mode: str, store: str, sender: int) -> None:
    connect(rank, 2, device=torch.device("cpu"), rendezvous=f"file://{store}")
    mesh = ParallelMesh.over_world(WORLD.layout)
    writer, step = BackgroundWriter(mesh), 0
    stage, state = WORLD.held(mesh, version=None)  # type: ignore[arg-type]
    replica = WORLD.replica(mesh, stage)  # type: ignore[arg-type]
    latest = mesh.broadcast_object(find_latest(folder) if rank == 0 else None)
    if latest is not None:
        manifest = load_checkpoint(latest, replica, state)
        step = manifest.step
        WORLD.assert_loaded([(mesh, stage, state, manifest)], version=step)

    def update(version: int) -> None:
        """As an optimizer does: every number changes, in place."""
        new_stage, new_state = WORLD.held(mesh, version=version)  # type: ignore[arg-type]
        writer.before_update()
        for held, new in ((stage.tensors, new_stage.tensors), (state.locals, new_state.locals)):
            for name, values in held.items():
                values.copy_(new[name])  # type: ignore[index]

    def tell(what: bytes, version: int) -> None:
        if rank == 0:
            os.write(sender, what + version.to_bytes(8, "little"))

    def tidy(version: int) -> None:
        tell(PUBLISHED, version)
        remove_older(folder, version, keep=KEPT, every=EVERY)
        tell(TIDIED, version)

    while True:
        step += 1
        update(step)
        tell(BEGUN, step)
        counters = {"step": step, "samples": step, "tokens": step}
        draft = draft_checkpoint(folder, replica, state, RunRecord(counters, {}))
        if mode == "waiting":
            write_draft(draft, mesh, partial(tidy, step))
            continue
        writer.start(draft, partial(tidy, step))
        done = None
        while done is None:
            update(step + 1)
            busy, failed = mesh.sum_over_world([float(writer.busy), float(writer.failed)])
            done = writer.advance(busy=bool(busy), failed=bool(failed))


def kill_once(folder: Path, mode: str, window: float, chance: random.Random) -> str:
    """Let a job go on, kill it within its next save but some, and check; where in the save that was."""
    job, before = Job(folder, mode), set(steps_in(folder))
    with job.running() as ranks:
        job.wait_for(BEGUN, chance.randint(1, 3))
        time.sleep(chance.uniform(0, window))
        order = chance.sample(ranks, 2)
        os.kill(order[0].pid or 0, signal.SIGKILL)
        time.sleep(chance.choice([0, chance.uniform(0, LONGEST_ALONE_SECONDS)]))
        os.kill(order[1].pid or 0, signal.SIGKILL)
    place = where(folder, job)
    check(folder, job, before)
    return place


def where(folder: Path, job: Job) -> str:
    """Return the phase that the kill interrupted, judged by the files that are left."""
    partials = [path for path in folder.glob(".step-*") if not path.name.endswith("removed")]
    if any(file.stat().st_size for path in partials for file in path.iterdir()):
        return "between the first byte and the publishing"
    if partials:
        return "before the first byte"
    if set(job.steps(BEGUN)) - set(job.steps(TIDIED)):
        return "around the publishing and the removal"
    return "between two saves"


def check(folder: Path, job: Job, before: set[int]) -> set[int]:
    """Raise AssertionError where something that was published is gone, or is not what was written.

    before: the steps that there were before the job; those there are now are returned.
    """
    told, latest = job.steps(PUBLISHED), find_latest(folder)
    if latest is None:
        assert not told and not before, f"{told or before} were published, and nothing is found"
        return set()
    last, held = read_manifest(latest).step, set(steps_in(folder))
    assert last in held and last >= max(told, default=0), f"{last} is the latest, and {told} were published"
    published = sorted({*before, *told, last})
    needed = {*published[-KEPT:], *(step for step in published if step % EVERY == 0)}
    assert needed <= held, f"{sorted(needed - held)} are gone; there are {sorted(held)}"
    for step in held:
        WORLD.assert_loaded(WORLD.load(folder / f"step-{step:06d}"), version=step)
        if step < last - 2 * EVERY:  # it was looked at often enough, and would make each look longer
            shutil.rmtree(folder / f"step-{step:06d}")
    truth.cache_clear()
    return set(steps_in(folder))


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]


def measured_window(folder: Path, mode: str) -> float:
    """Seconds of a save, from its beginning to the removal of what is no longer needed."""
    job = Job(folder, mode)
    with job.running():
        job.wait_for(TIDIED, 6)
    check(folder, job, set())
    return statistics.median(job.save_seconds())


def run(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill and check so many times; what came of it. Raises AssertionError."""
    chance, places = random.Random(seed), {mode: Counter[str]() for mode in MODES}
    windows = {}
    for mode in MODES:
        (folder / mode).mkdir()
        windows[mode] = measured_window(folder / mode, mode)
    for kill in range(kills):
        mode = MODES[kill % 2]
        places[mode][kill_once(folder / mode, mode, windows[mode], chance)] += 1
    return {
        "kills": kills,
        "seed": seed,
        "save_seconds": {mode: round(seconds, 4) for mode, seconds in windows.items()},
        "places": {mode: dict(found) for mode, found in places.items()},
        "between_the_first_byte_and_the_publishing": sum(
            found["between the first byte and the publishing"] for found in places.values()
        ),
        "torn_checkpoints_loaded": 0,
        "older_checkpoints_lost": 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--between", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="a folder for the dated JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)  # what is forked must not miss a pool of threads
    with tempfile.TemporaryDirectory(prefix="megalite-kills-") as folder:
        found = run(options.kills, options.seed, Path(folder))
    text = json.dumps({"date": date.today().isoformat(), "torch": torch.__version__, **found}, indent=2)
    print(text)
    if options.results is not None:
        (options.results / f"{date.today().isoformat()}-kills.json").write_text(text + "\n")
    return int(found["between_the_first_byte_and_the_publishing"] < options.between)


if __name__ == "__main__":
    sys.exit(main())
