"""A job of toy ranks, started as `python -m tests.support.local_job BEHAVIOUR FOLDER [WORLD_SIZE]`; no torch.

Replaces `megalite train`: prints an error as the command line does and exits with its code.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megalite.errors import DataError, MegaliteError
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.control.rank_process import RankEnd, run_rank
from megalite.launcher.local import LocalStart, run_local_ranks
from megalite.launcher.rank.detect import RankInfo, rank_info
from megalite.topology.axes import Layout

FAILING = 3
PEER_GONE = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22406"


def succeed(info: RankInfo, folder: Path) -> int:
    seen = {
        name: os.environ.get(name)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "LOCAL_SIZE")
    }
    # A collection of garbage must not copy the objects of the parent.
    seen["frozen"] = str(gc.get_freeze_count() > 0)
    (folder / f"seen-{info.rank}").write_text(repr(seen))
    return 0


def one_raises(info: RankInfo, folder: Path) -> int:
    if info.rank == FAILING:
        raise ValueError("the moon is in the wrong place")
    return _wait(folder, info)


def one_exits(info: RankInfo, folder: Path) -> int:
    if info.rank == FAILING:
        os._exit(7)
    return _wait(folder, info)


def one_is_killed_and_the_others_notice(info: RankInfo, folder: Path) -> int:
    _train()
    if info.rank == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(PEER_GONE)


def one_loses_a_peer(info: RankInfo, folder: Path) -> int:
    _train()
    if info.rank == FAILING:
        raise RuntimeError(PEER_GONE)
    return _wait(folder, info)


def one_raises_late_and_the_others_notice_first(info: RankInfo, folder: Path) -> int:
    _train()
    if info.rank == FAILING:
        time.sleep(0.5)
        raise ValueError("the moon is in the wrong place")
    raise RuntimeError(PEER_GONE)


def one_raises_and_the_others_are_deaf(info: RankInfo, folder: Path) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return one_raises(info, folder)


def one_is_killed_with_helpers(info: RankInfo, folder: Path) -> int:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if info.rank == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    return _wait(folder, info)


def all_raise_alike(info: RankInfo, folder: Path) -> int:
    raise DataError("data.source: /nowhere: no such file")


def all_meet_and_raise_alike(info: RankInfo, folder: Path) -> int:
    """On a busy machine a rank that starts late would be ended because of the others before it raises."""
    (folder / f"met-{info.rank}").touch()
    while len(list(folder.glob("met-*"))) < info.world_size:
        time.sleep(0.01)
    return all_raise_alike(info, folder)


def some_stop_in_good_order(info: RankInfo, folder: Path) -> int:
    return 75 if info.rank else 0


def wait(info: RankInfo, folder: Path) -> int:
    return _wait(folder, info)


def wait_deaf_to_interrupts(info: RankInfo, folder: Path) -> int:
    signal.signal(signal.SIGINT, lambda *_: (folder / f"interrupted-{info.rank}").touch())
    return _wait(folder, info)


def stop_when_told(info: RankInfo, folder: Path) -> int:
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    (folder / f"ready-{info.rank}").touch()
    while not told:
        time.sleep(0.02)
    time.sleep(0.3)  # a checkpoint
    return 75


def save_when_interrupted(info: RankInfo, folder: Path) -> int:
    """As a run does that has noted Ctrl-C."""
    told: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    (folder / f"ready-{info.rank}").touch()
    while not told:
        time.sleep(0.02)
    time.sleep(1.5)  # a checkpoint, longer than a job takes to end ranks that fail
    (folder / f"saved-{info.rank}").touch()
    raise KeyboardInterrupt


def fail_when_interrupted(info: RankInfo, folder: Path) -> int:
    """Ctrl-C comes, and the disk is full."""
    try:
        return _wait(folder, info)
    except KeyboardInterrupt:
        raise DataError("the checkpoint cannot be written: no space left") from None


def one_is_killed_beside_a_process_of_the_users(info: RankInfo, folder: Path) -> int:
    """`main` starts that process in a thread of its own, as soon as the ranks are there."""
    (folder / f"ready-{info.rank}").touch()
    while not (folder / "users").exists():
        time.sleep(0.02)
    return one_is_killed_with_helpers(info, folder)


def _start_a_process_of_the_users(folder: Path) -> None:
    """One child, and a child of it that loses its parent, as a daemon does."""
    while len(list(folder.glob("ready-*"))) < 8:
        time.sleep(0.02)
    # Without the pipes of the test, which would wait for their end.
    sleeper = ["sh", "-c", "exec sleep 600 >/dev/null 2>&1"]
    child = subprocess.Popen(sleeper)
    text = f"import subprocess; print(subprocess.Popen({sleeper}).pid)"
    made = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, check=True)
    (folder / "partial").write_text(f"{child.pid} {made.stdout}")
    (folder / "partial").rename(folder / "users")


def one_raises_and_cannot_exit(info: RankInfo, folder: Path) -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("the moon is in the wrong place")


def cannot_connect(info: RankInfo, folder: Path) -> int:
    """As torch raises it where a host has given its loopback address to the others."""
    progress.begin(Activity.MEETING)
    raise RuntimeError(
        "Gloo connectFullMesh failed with [pair.cc] Connection refused, remote=[127.0.1.1]:4022"
    )


def _train() -> None:
    """Leave the marks of a rank in its thirteenth step."""
    progress.finished(12)
    progress.begin(Activity.REDUCING)
    progress.collective("all_reduce", "dp")


def _wait(folder: Path, info: RankInfo) -> int:
    (folder / f"ready-{info.rank}").write_text(f"{os.getppid()} {os.getpid()}")
    time.sleep(600)
    return 0


def main(behaviour: str, folder: Path, world_size: int = 8) -> int:
    worker: Callable[[RankInfo, Path], int] = globals()[behaviour]
    layout = Layout(2, 2, 2) if world_size == 8 else Layout(tensor=world_size)
    info = rank_info()
    if worker is one_is_killed_beside_a_process_of_the_users:
        threading.Thread(target=_start_a_process_of_the_users, args=(folder,), daemon=True).start()
    try:
        if info is None:
            return run_local_ranks(
                worker, layout, folder / "failures", arguments=(folder,), start=LocalStart(())
            )
        end = RankEnd(info, layout, folder / "failures", say=lambda text: print(text, file=sys.stderr))
        end.watch()
        return run_rank(worker, end, arguments=(folder,))
    except KeyboardInterrupt:
        return 130
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])))
