"""Test implementations in a worker process, which may crash or hang without harm to the caller."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from megalite.errors import KernelError
from megalite.selftest.registry import Case
from megalite.selftest.trust import CaseResult, Findings

CASE_SECONDS = 60.0
"""The time limit of one implementation in one case."""
START_SECONDS = 120.0
"""The time limit for a worker to import torch and initialise the device."""
_END_SECONDS = 10.0
_START = "import sys; sys.path[:] = {path!r}; from megalite.selftest import worker; sys.exit(worker.main(sys.argv[1:]))"
_Found = dict[str, dict[str, dict[str, CaseResult]]]
Tell = Callable[[Case, str, CaseResult], None]


def prove_all(
    cases: Sequence[Case],
    device: torch.device,
    *,
    entries: Path | None = None,
    case_seconds: float = CASE_SECONDS,
    total_seconds: float = float("inf"),
    tell: Tell = lambda case, implementation, finding: None,
) -> Findings:
    """Compare and time every implementation of every case; the result lacks those not reached in total_seconds.

    entries: the file of the cases' entries, if they are not this package's. tell: called after each implementation.
    Raises KernelError if no worker can initialise the device.
    """
    deadline = time.monotonic() + total_seconds
    findings: _Found = {}

    def note(case: Case, name: str, finding: CaseResult) -> None:
        findings.setdefault(case.entry.operator, {}).setdefault(case.key, {})[name] = finding
        tell(case, name, finding)

    failed: dict[tuple[str, str], CaseResult] = {}
    worker: _Worker | None = None
    pairs = [(case, name) for case in cases for name in case.entry.candidates]
    try:
        for case, name in pairs:
            if complaint := case.entry.candidates[name].why_not_on(device.type):
                note(case, name, CaseResult("absent", complaint))
                continue
            if fault := failed.get((case.entry.name, name)):
                note(case, name, fault)  # it would crash or time out again
                continue
            if worker is None:
                worker = _Worker(device, entries, min(START_SECONDS, deadline - time.monotonic()))
            seconds = min(case_seconds, deadline - time.monotonic())
            if seconds <= 0:
                break
            finding = worker.prove(case, name, seconds)
            if finding is None and seconds < case_seconds:
                break  # it had less than its time limit, so the timeout proves nothing
            if finding is None:
                finding = CaseResult("failed", f"failed: no answer after {case_seconds:g} s")
            if finding.verdict == "failed":
                # A failed kernel may have destroyed the worker's device context: use a new worker.
                worker.end()
                worker = None
                failed[case.entry.name, name] = finding
            note(case, name, finding)
    except TimeoutError:
        pass  # total_seconds ended while a worker was starting
    finally:
        if worker is not None:
            worker.end()
    return findings


class _Worker:
    """A process of selftest/worker.py."""

    def __init__(self, device: torch.device, entries: Path | None, seconds: float):
        """Start the process. Raises KernelError on failure, TimeoutError if `seconds` was below START_SECONDS."""
        reading, writing = os.pipe()
        words = ["--device", str(device), "--answers", str(writing), "--parent", str(os.getpid())]
        words += [] if entries is None else ["--entries", str(entries)]
        self._answers = reading
        self._rest = b""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        self._process = subprocess.Popen(
            # With this process's modules, not those of the working directory.
            [sys.executable, "-P", "-c", _START.format(path=sys.path), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,  # a pipe without a reader would block the worker once it is full
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        line = self._line(seconds)
        if not line:
            said = f"no answer after {seconds:.0f} s" if line is None else self._reason()
            self.end()
            if line is None and seconds < START_SECONDS:
                raise TimeoutError(said)
            raise KernelError(f"the self-test cannot start on {device}: {said}")

    def prove(self, case: Case, implementation: str, seconds: float) -> CaseResult | None:
        """Test one implementation in the worker; None if there was no answer in `seconds`."""
        asked = {
            "entry": case.entry.name,
            "dtype": str(case.dtype).removeprefix("torch."),
            "shapes": case.shapes,
            "own": case.own,
            "implementation": implementation,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return CaseResult("failed", f"failed: {self._reason()}")
        line = self._line(seconds)
        if line is None:
            return None
        return CaseResult(**json.loads(line)) if line else CaseResult("failed", f"failed: {self._reason()}")

    def end(self) -> None:
        """Kill the worker and its child processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in the driver: even SIGKILL does not end it
            self._process.wait(_END_SECONDS)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._said.close()
        os.close(self._answers)

    def _line(self, seconds: float) -> str | None:
        """Return the worker's next line; empty if the worker has ended, None if no line came in time."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                return None
            read = os.read(self._answers, 1 << 16)
            if not read:
                return ""
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _reason(self) -> str:
        """Return the cause of the worker's end: a signal, or its last line."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its pipe and did not end"
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip().splitlines()
        return f"it ended with code {code}: {words[-1] if words else 'it said nothing'}"
