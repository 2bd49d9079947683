"""Exchanges short values between the ranks of MPICH's or Intel MPI's mpirun, without an MPI library: PMI 1.

mpirun keeps an open connection to each rank (PMI_FD) and stores values for them: lines of name=value pairs.
"""

import base64
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from megalite.errors import LaunchError


class ProcessManager:
    """A connection to mpirun; the process can make one in its life. Raises LaunchError where mpirun does not answer."""

    def __init__(self, descriptor: int, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size, self._seconds, self._round = rank, size, seconds, 0
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._socket.settimeout(seconds)
        self._answers = self._socket.makefile("r")
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._store = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's JSON value in every rank. Collective."""
        name = self._next()
        if self.rank == root:
            self._put(name, value)
        self._barrier()
        return self._get(name)

    def allgather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks. Collective."""
        name = self._next()
        self._put(f"{name}-{self.rank}", value)
        self._barrier()
        return [self._get(f"{name}-{rank}") for rank in range(self.size)]

    def close(self) -> None:
        """Tell mpirun that this rank needs it no more, so that the rank may end as it likes."""
        self._ask("finalize", "finalize_ack")
        self._answers.close()
        self._socket.close()

    def _next(self) -> str:
        self._round += 1
        return f"megalite-{self._round}"

    def _put(self, name: str, value: Any) -> None:
        # A value has no spaces and no "=".
        text = base64.b32encode(json.dumps(value).encode()).decode().rstrip("=")
        self._ask(f"put kvsname={self._store} key={name} value={text}", "put_result")

    def _get(self, name: str) -> Any:
        text = self._ask(f"get kvsname={self._store} key={name}", "get_result")["value"]
        return json.loads(base64.b32decode(text + "=" * (-len(text) % 8)))

    def _barrier(self) -> None:
        self._ask("barrier_in", "barrier_out")

    def _ask(self, command: str, expected: str) -> Mapping[str, str]:
        try:
            self._socket.sendall(f"cmd={command}\n".encode())
            line = self._answers.readline()
        except TimeoutError:
            raise LaunchError(
                f"the {self.size} ranks of mpirun did not all come within {self._seconds:g} s; see whether mpirun has "
                "started all of them, or export MASTER_ADDR to every rank (-genv MASTER_ADDR HOST)"
            ) from None
        except OSError as error:
            line = str(error)
        answer = dict(pair.partition("=")[::2] for pair in line.split())
        if answer.get("cmd") != expected or answer.get("rc", "0") != "0":
            raise LaunchError(
                f"mpirun answered {line.strip()!r} where ranks agree on MASTER_ADDR (PMI 1: {command.split()[0]}); "
                "export MASTER_ADDR to every rank (-genv MASTER_ADDR HOST)"
            )
        return answer
