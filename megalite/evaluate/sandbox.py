"""Runs a generated program in a process of its own: limited, without a network where the system permits. No torch.

This keeps accidents away from the machine, not attacks: the program reads what this user may read. Code of a model that
nobody trusts belongs into a container or a virtual machine.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LIMITED = Path(__file__).with_name("limited.py")
# A network of its own without devices, and processes that end with the first one.
_APART = ("--user", "--map-current-user", "--net", "--ipc", "--pid", "--fork", "--kill-child")
_MOST_OUTPUT = 1 << 16
# The last line of a traceback.
_ERROR = re.compile(r"[A-Z]\w*(Error|Exception|Interrupt|Exit|Iteration|Warning)(:|$)")


@dataclass(frozen=True)
class Limits:
    """seconds: of wall-clock time, and of CPU time. memory: bytes of address space."""

    seconds: int = 10
    memory: int = 1 << 30


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """Whether the program ran to its end. reason: why not; "" if it did."""

    passed: bool
    reason: str = ""


@cache
def network_is_cut() -> bool:
    """Return whether programs can be run without a network here."""
    return bool(_apart())


@cache
def _apart() -> tuple[str, ...]:
    """Return the command that starts a program without a network; empty where the system does not permit that."""
    program = shutil.which("unshare")
    if program is None:
        return ()
    command = (program, *_APART, "--")
    done = subprocess.run([*command, "true"], capture_output=True, timeout=30, check=False)
    return command if done.returncode == 0 else ()


def run_program(program: str, limits: Limits) -> Outcome:
    """Run a Python program; it has passed if it reached its last line and ended with exit code 0.

    The program has an empty temporary folder as its working folder, no variables of this process, no input, and cannot
    start processes where the system counts them.
    """
    token = secrets.token_hex(16)
    # A program that leaves early, by sys.exit(0), does not show the token.
    whole = f"{program}\n\nprint({token!r})\n"
    # Processes that have just been killed may write a last file.
    with tempfile.TemporaryDirectory(prefix="megalite-program-", ignore_cleanup_errors=True) as folder:
        work, file, output = Path(folder, "work"), Path(folder, "program.py"), Path(folder, "output")
        work.mkdir()
        file.write_text(whole, encoding="utf-8", errors="replace")
        limited = (
            sys.executable,
            "-I",
            "-S",
            str(_LIMITED),
            str(limits.seconds),
            str(limits.memory),
            str(file),
        )
        with output.open("wb") as written:
            started = subprocess.Popen(
                [*_apart(), *limited],
                cwd=work,
                env={"PATH": os.defpath, "HOME": str(work), "TMPDIR": str(work), "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = started.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"no end within {limits.seconds} s")
        finally:
            _end(started)
        shown = _last_bytes(output).decode("utf-8", errors="replace").strip().splitlines()
    last = shown[-1] if shown else ""
    if code == 0:
        return Outcome(True) if last == token else Outcome(False, "left before its last line")
    return Outcome(False, last if _ERROR.match(last) else f"exit code {code}")


def _end(started: "subprocess.Popen[bytes]") -> None:
    """End the program and all that it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def _last_bytes(output: Path) -> bytes:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _MOST_OUTPUT))
        return file.read()
