"""How long failures, signals and restarts take on two hosts with two ranks each: `python -m benchmarks.launch_times`.

Trains a tiny model with `megalite launch --backend ssh` on hosts in namespaces (root, and the packages of
tests/launch/setup.sh), breaks it, and prints seconds of wall time. The first figure of each row starts with the event.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.hosts import Hosts, missing
from tests.support.jobs import Job
from tests.support.real_launchers import Started, ranks, run
from tests.support.waiting import wait_until

LONG = ("--training.steps", "100000", "--checkpoint.every", "100000")
HEARTBEAT_SECONDS = 10
# Longer than any figure.
PATIENCE_SECONDS = 180


class Measured:
    """A training on two hosts that has made its second step."""

    def __init__(self, hosts: Hosts, folder: Path, *flags: str, options: tuple[str, ...] = ()) -> None:
        self.hosts = hosts
        self.folder = folder / "run"
        job = Job.write(folder)
        arguments = ["megalite", *job.arguments(self.folder, *LONG, *flags)]
        self.started: Started = run("launch-ssh", hosts, arguments, options=options)
        self.started.until("step      2/", PATIENCE_SECONDS)

    def seconds(self, event: Callable[[], object], condition: Callable[[], bool]) -> float:
        """Return the seconds from the event until the condition holds."""
        began = time.monotonic()
        event()
        wait_until(condition, self.started.output[-3000:], PATIENCE_SECONDS, every=0.02)
        return time.monotonic() - began

    def printed(self, *words: str) -> Callable[[], bool]:
        """Return whether a text that is printed from now on holds one of these words."""
        before = len(self.started.output)
        return lambda: any(word in self.started.output[before:] for word in words)

    def gone(self) -> bool:
        return not self.hosts.processes("megalite")

    def kill_rank(self) -> None:
        os.kill(ranks(self.hosts)[3], signal.SIGKILL)


def crash(on: Measured) -> dict[str, float]:
    shown = on.seconds(on.kill_rank, on.printed("rank 3"))
    return {
        "rank killed -> first cause on screen": shown,
        "... -> all processes gone": shown + on.seconds(int, on.gone),
    }


def launcher_killed(on: Measured) -> dict[str, float]:
    def kill() -> None:
        on.hosts[0].send(on.started.launchers[0], signal.SIGKILL)

    return {"launcher killed -> no process left": on.seconds(kill, on.gone)}


def link_down(on: Measured) -> dict[str, float]:
    seen = on.printed("n1")
    seconds = on.seconds(lambda: on.hosts[1].link(up=False), seen)
    return {f"link down -> report (heartbeat {HEARTBEAT_SECONDS} s)": seconds}


def signalled(on: Measured) -> dict[str, float]:
    def stop() -> None:
        on.hosts[0].send(on.started.launchers[0], signal.SIGTERM)

    return {
        "SIGTERM -> published checkpoint": on.seconds(stop, (on.folder / "checkpoints" / "latest").exists)
    }


def restarted(on: Measured) -> dict[str, float]:
    on.started.until("saved step-", PATIENCE_SECONDS)
    # A new attempt counts its steps from the checkpoint: its header comes before its first step.
    before = len(on.started.output)

    def stepped() -> bool:
        text = on.started.output[before:]
        return "megalite 0." in text and "\nstep " in text[text.index("megalite 0.") :]

    return {"rank killed -> first new step of the restart": on.seconds(on.kill_rank, stepped)}


SCENARIOS: list[tuple[Callable[[Measured], dict[str, float]], tuple[str, ...], tuple[str, ...]]] = [
    (crash, (), ()),
    (launcher_killed, (), ()),
    (link_down, ("--launch.heartbeat_seconds", str(HEARTBEAT_SECONDS)), ()),
    (signalled, (), ()),
    (restarted, ("--checkpoint.every", "3"), ("--restarts", "1")),
]


def main() -> int:
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    chosen = sys.argv[1:]
    for scenario, flags, options in SCENARIOS:
        if chosen and scenario.__name__ not in chosen:
            continue
        with Hosts.up(2) as hosts, tempfile.TemporaryDirectory() as folder:
            for what, seconds in scenario(Measured(hosts, Path(folder), *flags, options=options)).items():
                print(f"{seconds:7.1f} s  {what}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
