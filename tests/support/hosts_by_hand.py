"""Hosts to try things on by hand, as root.

`python -m tests.support.hosts_by_hand up 2 --slurm` brings them up and waits; Ctrl-C ends them. Meanwhile, elsewhere:
`python -m tests.support.hosts_by_hand shell n0` opens a shell on n0, in the current folder; with words after n0 it runs
that command there.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.support.hosts import Hosts, entering, missing
from tests.support.slurm_cluster import SlurmCluster

RECORD = "by-hand.json"


def up(count: int, slurm: bool, own_address: str | None) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Hosts.up(count, own_address) as hosts:
        if slurm:
            SlurmCluster.up(hosts)
        record = {"python": os.getpid(), "hosts": {host.name: host.pid for host in hosts}}
        (hosts.folder / RECORD).write_text(json.dumps(record))
        print(f"hosts {', '.join(host.name for host in hosts)}; a hostfile: {hosts.hostfile()}")
        print(
            f"a shell: python -m {__spec__.name} shell n0 --of {os.getpid()}; Ctrl-C ends the hosts",
            flush=True,
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("ending the hosts")
    return 0


def shell(name: str, of: int | None, command: list[str]) -> int:
    folders = Path(tempfile.gettempdir()).glob(f"megalite-hosts-{of or '*'}-*/{RECORD}")
    records = [
        json.loads(file.read_text()) for file in sorted(folders, key=lambda file: file.stat().st_mtime)
    ]
    if not records or name not in records[-1]["hosts"]:
        print(f"error: no host {name}; bring hosts up first: python -m {__spec__.name} up 2", file=sys.stderr)
        return 2
    variables = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
    words = entering(records[-1]["hosts"][name], command or ["bash"], variables, Path.cwd())
    os.execvp(words[0], words)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    bring = commands.add_parser("up")
    bring.add_argument("count", type=int, nargs="?", default=2)
    bring.add_argument("--slurm", action="store_true")
    bring.add_argument("--own-address", help="what /etc/hosts says of a host's own name, as 127.0.1.1")
    enter = commands.add_parser("shell")
    enter.add_argument("--of", type=int, help="the process id that `up` printed (default: the latest)")
    enter.add_argument("host")
    enter.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if chosen.what == "up":
        return up(chosen.count, chosen.slurm, chosen.own_address)
    return shell(chosen.host, chosen.of, chosen.command)


if __name__ == "__main__":
    sys.exit(main())
