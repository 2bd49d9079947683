"""Has ranks of mpirun agree on the address and port where they meet; MPI does nothing else in a run.

By mpirun's own store for MPICH and Intel MPI (`pmi.py`), else by mpi4py in a child of each rank: in the trainer MPI's
ranks would spin while they wait, and it does not survive forks and quick ends.
"""

import importlib.util
import json
import os
import random
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from megalite.errors import LaunchError
from megalite.launcher.process import die_with_parent
from megalite.launcher.rank.address import serving_addresses
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.pmi import ProcessManager

_PROBE_SECONDS, _END_SECONDS = 3.0, 20.0
_PORTS = range(20000, 30000)  # below the ephemeral ports of Linux
_CHILD = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from megalite.launcher.rank.mpi import agree; agree(sys.argv[2:])"
)
_OTHERWISE = "export MASTER_ADDR to every rank (Open MPI: -x MASTER_ADDR, MPICH: -genv MASTER_ADDR HOST)"


def master_over_mpi(
    info: RankInfo, environ: Mapping[str, str], *, interface: str = "auto", seconds: float
) -> RankInfo:
    """Return `info` with the master address and port that all ranks of mpirun agree on.

    Every rank must call it. interface: the setting launch.interface. seconds: the longest wait for the other ranks.
    Raises LaunchError without mpi4py, where it found other ranks than mpirun started, and where rank 0 has no address
    that all ranks reach.
    """
    addresses = serving_addresses(environ, interface) if info.rank == 0 else []
    if info.launcher == "mpich" and environ.get("PMI_FD", "").isdecimal():
        # MPICH 4.0 over UCX hangs at its end every other time, so its library is not loaded.
        manager = ProcessManager(int(environ["PMI_FD"]), info.rank, info.world_size, seconds)
        meeting_point = _meeting_point(manager, info.rank, addresses)
        manager.close()
    else:
        meeting_point = _over_mpi(info, addresses, environ, seconds)
    if "error" in meeting_point:
        raise LaunchError(meeting_point["error"])
    port = environ.get("MASTER_PORT", "").strip()
    return replace(
        info,
        master_addr=meeting_point["address"],
        master_port=info.master_port if port else meeting_point["port"],
    )


def _over_mpi(
    info: RankInfo, addresses: Sequence[str], environ: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """Return the meeting point that the ranks agree on by mpi4py, or an error."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(
            f"MASTER_ADDR is not set, and mpi4py, by which the {info.world_size} ranks on several hosts could agree on "
            f"it, is not installed; install it (pip install 'megalite[mpi]'), or {_OTHERWISE}"
        )
    task = {"rank": info.rank, "size": info.world_size, "addresses": addresses, "launcher": info.launcher}
    return _in_child(task, environ, seconds)


def _in_child(task: Mapping[str, Any], environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Run `agree` in a child process and return its answer."""
    # mpi4py's wheels fit both MPIs, and take Open MPI where both are installed.
    own = {"MPI4PY_MPIABI": str(task["launcher"]), "OMPI_MCA_mpi_yield_when_idle": "1"}
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", _CHILD, root, str(os.getpid()), str(writer), json.dumps(task)]
    with TemporaryFile() as errors, os.fdopen(reader, "rb") as answer:
        # MPICH's ranks talk to mpirun through an open file (PMI_FD), which the child must keep.
        child = subprocess.Popen(
            command, close_fds=False, env=own | dict(environ), stdout=errors, stderr=errors
        )
        os.close(writer)
        heard = bool(select.select([answer], [], [], seconds)[0])
        text = answer.read() if heard else b""
        try:
            code = child.wait(_END_SECONDS if heard else 0)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        if not heard:
            rule = f"the {task['size']} ranks did not all meet over MPI within {seconds:g} s"
            return {"error": f"{rule}; see whether mpirun has started all of them, or {_OTHERWISE}"}
        if text:
            return dict(json.loads(text))
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    return {
        "error": f"MPI ended with exit code {code} while ranks agreed on MASTER_ADDR; {_OTHERWISE}\n{said}"
    }


def agree(arguments: Sequence[str]) -> None:
    """Run the child: write the address and port, or an error, to the file descriptor of the parent.

    arguments: the parent's process id, the file descriptor, and the task as JSON.
    """
    parent, writer, task = int(arguments[0]), int(arguments[1]), json.loads(arguments[2])
    die_with_parent(parent)
    os.set_inheritable(writer, False)
    with os.fdopen(writer, "w") as answer:
        _answer(answer, **task)


def _answer(answer: IO[str], rank: int, size: int, addresses: list[str], launcher: str) -> None:
    """Write the meeting point or an error, and end MPI."""
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    try:
        from mpi4py import MPI
    except ImportError as error:
        rule = f"mpi4py cannot load the library of {launcher}, whose mpirun started the ranks ({error})"
        remedy = (
            "put its folder into LD_LIBRARY_PATH (Debian's MPICH: with a link libmpi.so.12 to libmpich.so.12)"
        )
        json.dump({"error": f"{rule}; {remedy}, or {_OTHERWISE}"}, answer)
        return
    MPI.Init_thread(MPI.THREAD_SINGLE)
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) == (rank, size):
        meeting_point = _meeting_point(world, rank, addresses)
    else:
        library = MPI.Get_library_version().partition(",")[0].splitlines()[0].strip()
        meeting_point = {
            "error": f"mpi4py sees rank {world.Get_rank()} of {world.Get_size()}, but mpirun ({launcher}) started rank "
            f"{rank} of {size}: mpi4py uses {library}; set MPI4PY_MPIABI={launcher}, or install mpi4py for that MPI "
            f"(pip install --no-binary mpi4py mpi4py), or {_OTHERWISE}"
        }
    json.dump(meeting_point, answer)
    answer.close()
    world.Barrier()  # no rank ends MPI while messages are on their way
    MPI.Finalize()


def _meeting_point(world: Any, rank: int, addresses: list[str]) -> dict[str, Any]:
    """Return the first of rank 0's addresses that every rank reaches, and a free port there. Collective."""
    with ExitStack() as stack:
        probes = [stack.enter_context(_Probe(address)) for address in addresses]
        offers = [(probe.address, probe.port, probe.token, _free_port(probe.address)) for probe in probes]
        offers = world.bcast(offers, root=0)
        reached = [rank == 0 or _reaches(address, port, token) for address, port, token, _ in offers]
        everyone = world.allgather((socket.gethostname(), reached))
    for place, (address, _, _, free) in enumerate(offers):
        if all(reached[place] for _, reached in everyone):
            return {"address": address, "port": free}
    lost = sorted({host for host, reached in everyone if not all(reached)})
    tried = ", ".join(address for address, *_ in offers)
    return {
        "error": f"no address of rank 0's host {everyone[0][0]} ({tried}) is reached by all ranks, not from "
        f"{', '.join(lost)}; set launch.interface to the network between the hosts, or {_OTHERWISE}"
    }


class _Probe:
    """Serves a random token on one address, so that no rank takes another host's service for rank 0's."""

    def __init__(self, address: str) -> None:
        self.address, self.token = address, secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "_Probe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.sendall(self.token.encode())


def _reaches(address: str, port: int, token: str) -> bool:
    """Whether the probe with this token answers there."""
    try:
        with socket.create_connection((address, port), _PROBE_SECONDS) as connection:
            return connection.makefile("rb").read(len(token)) == token.encode()
    except OSError:
        return False


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in random.sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.create_server((address, port), family=family):
            return port
    raise LaunchError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free on {address}; export MASTER_PORT")
