"""Ranks of both real MPIs on two hosts agree on a master without MASTER_ADDR, and MPI lets them end as they like."""

import re

import pytest

from tests.support import real_launchers
from tests.support.hosts import Hosts
from tests.support.real_launchers import PYTHON

pytestmark = pytest.mark.extended

RANK = """
import os, sys, time
from megalite.errors import LaunchError
from megalite.launcher.rank.address import route_to_master
from megalite.launcher.rank.detect import rank_info
from megalite.launcher.rank.mpi import master_over_mpi
info = rank_info()
try:
    found = master_over_mpi(info, os.environ, seconds=60)
except LaunchError as error:
    print(f"rank {info.rank} refused: {error}", flush=True)
    sys.exit(2)
route = route_to_master(found, os.environ)
print(f"rank {info.rank} meets at {found.master_addr}:{found.master_port} over {route.interface}", flush=True)
if os.fork() == 0:
    os._exit(0)
os.wait()
if info.rank == int(sys.argv[1]):
    time.sleep(1)  # mpirun ends the others then
    os._exit(7)
"""


def ranks(hosts: Hosts, kind: str, failing: int, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Start RANK on both hosts under `kind` of MPI; return the exit code of mpirun and the output."""
    program = [PYTHON, "-c", RANK, str(failing)]
    if kind == "openmpi":
        names = [each for name in ("PYTHONPATH", *(env or {})) for each in ("-x", name)]
        command = ["mpirun", *names, "--hostfile", str(hosts.hostfile()), "-n", "4", *program]
    else:
        command = ["mpirun", "-f", real_launchers.mpich_hostfile(hosts), "-n", "4", *program]
    variables = real_launchers.mpi_path(hosts, kind) | (env or {})
    done = hosts[0].run(command, env=variables, timeout=90, merged=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_all_ranks_agree_and_mpirun_passes_their_exit_codes_on(hosts: Hosts, kind: str) -> None:
    code, output = ranks(hosts, kind, failing=-1)
    places = re.findall(r"rank \d meets at (\S+):(\d+) over (\w+)", output)
    assert code == 0, output
    assert len(places) == 4 and len(set(places)) == 1, output
    assert places[0][0] == "10.77.0.10" and places[0][2] == "eth0"
    code, output = ranks(hosts, kind, failing=3)
    assert code == 7, output
    assert len(re.findall(r"rank \d meets at", output)) == 4


def test_mpi4py_of_another_mpi_is_said(hosts: Hosts) -> None:
    other = real_launchers.mpi4py_for_mpich(hosts)
    code, output = ranks(hosts, "openmpi", -1, other)
    assert code == 2
    assert re.search(
        r"rank \d refused: mpi4py sees rank 0 of 1, but mpirun \(openmpi\) started rank \d of 4: mpi4py uses MPICH"
        r".*; set MPI4PY_MPIABI=openmpi",
        output,
    ), output
