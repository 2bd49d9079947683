"""The preflight: asks every host, before a rank starts there, whether a job can run on it.

A transport (ssh, srun or this machine's shell) starts `probe.py` on all hosts at once, and asks it over stdin and
stdout.
"""

import json
import secrets
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import LaunchError, listed
from megalite.launcher.hosts import probe
from megalite.launcher.hosts.host_report import HostFinding, HostReport, HostRequirements, is_loopback, judge
from megalite.launcher.hosts.host_table import table
from megalite.launcher.hosts.job_hosts import Hosts

SECONDS = 20.0
"""How long a host may take for an answer, by default."""

_AT_ONCE = 64
_MARKER_SECONDS = 5.0  # a network file system may show another host's file late
_FAILURES = {"folder", "interpreter"}
# Reads the probe's length and text from stdin, whose rest are the questions.
_BOOT = (
    "import sys; n = int(sys.stdin.readline()); "
    "exec(compile(sys.stdin.read(n), 'the probe of the preflight', 'exec'))"
)


@dataclass(frozen=True)
class Transport:
    """A way to run a command on a host. prefix: host -> arguments, behind which one shell command is appended."""

    name: str
    prefix: Callable[[str], Sequence[str]]


def over_ssh(more: Sequence[str] = ()) -> Transport:
    """Reach hosts by ssh, which may ask no question; more: options of ssh, as -p 2222."""
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *more]
    return Transport("ssh", lambda host: ["ssh", *options, "--", host])


def over_srun() -> Transport:
    """Reach the hosts of the SLURM allocation that this process runs in."""
    options = ["--overlap", "--nodes=1", "--ntasks=1", "--immediate=10", "--mpi=none"]
    return Transport("srun", lambda host: ["srun", *options, f"--nodelist={host}", "sh", "-c"])


def locally() -> Transport:
    """Use this machine; its ranks need no network."""
    return Transport("local", lambda host: ["sh", "-c"])


def transport_to(hosts: Hosts, ssh_options: Sequence[str] = ()) -> Transport:
    """Return the way to reach hosts, which follows from where they were found; ssh_options: those of the backend."""
    if hosts.source == "hostfile":
        return over_ssh(ssh_options)
    return over_srun() if hosts.source == "slurm" else locally()


@dataclass(frozen=True)
class Preflight:
    """The result: every host's report, in the order of the hosts, and the findings, errors first."""

    reports: Sequence[HostReport]
    findings: Sequence[HostFinding]

    @property
    def passed(self) -> list[str]:
        """The hosts without an error."""
        failed = {each.host for each in self.findings if each.level == "error"}
        return [report.host for report in self.reports if report.host not in failed]

    def lines(self) -> Iterator[str]:
        """Yield the table and the findings as sentences, errors last."""
        yield from table(self.reports, self.findings)
        for level in ("note", "warning", "error"):
            yield from self._sentences(level)

    def require(self) -> None:
        """Raise LaunchError if any host has an error."""
        failed = [report.host for report in self.reports if report.host not in self.passed]
        if failed:
            those = listed(failed, most=64) if len(self.reports) > 1 else "this machine"
            raise LaunchError(
                f"{those} did not pass the preflight, for the reasons above; no rank was started"
            )

    def _sentences(self, level: str) -> Iterator[str]:
        groups: dict[tuple[str, str], list[str]] = {}
        for finding in self.findings:
            if finding.level == level:
                groups.setdefault((finding.message, finding.remedy), []).append(finding.host)
        for (message, remedy), hosts in groups.items():
            yield f"{level}: {listed(hosts, most=64)}: {message}" + (f"; {remedy}" if remedy else "")


def preflight(
    slots: Mapping[str, int], needs: HostRequirements, transport: Transport, seconds: float = SECONDS
) -> Preflight:
    """Ask all hosts at once; slots: host -> number of ranks, the first host has rank 0.

    seconds: how long each host may take for an answer. Unreachable hosts and all other problems are in the result.
    """
    reports = [HostReport(host, count) for host, count in slots.items()]
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(_Session(report, needs, transport.prefix(report.host), seconds))
            for report in reports
        ]
        with ThreadPoolExecutor(_AT_ONCE) as threads:

            def together(step: Callable[[_Session], None]) -> None:
                list(threads.map(step, (session for session in sessions if not session.report.failure)))

            together(_Session.start)
            together(_Session.learn)
            if needs.run_folder is not None and len(sessions) > 1:
                _compare_run_folders(sessions, together, str(needs.run_folder))
            if transport.name != "local":
                _connect(sessions, together, needs)
        for session in sessions:
            session.hang_up()
    return Preflight(reports, judge(reports, needs))


class _Session:
    """The session with the probe on one host; any failure ends it and is written into the report."""

    def __init__(self, report: HostReport, needs: HostRequirements, prefix: Sequence[str], seconds: float):
        self.report, self._needs = report, needs
        self._command = [*prefix, _shell_command(needs)]
        self._seconds = seconds
        self._late = False
        self.token = secrets.token_hex(8)
        self.port = 0

    def __enter__(self) -> "_Session":
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        if self._process is not None:
            assert self._process.stdout
            try:
                self._process.wait(1 if self.report.failure else 5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        self._errors.close()

    def hang_up(self) -> None:
        """Let the probe end, without waiting for it."""
        if self._process is not None and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()

    def start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self.report.failure = "unreachable"
            self.report.detail = f"{self._command[0]} cannot be run: {error.strerror}"
            return
        text = Path(probe.__file__).read_text(encoding="ascii")
        self._exchange(f"{len(text)}\n{text}")

    def learn(self) -> None:
        paths = {
            "run_file": str(self._needs.run_file or ""),
            "run_folder": str(self._needs.run_folder or ""),
        }
        self.report.facts = self.ask("facts", paths) or {}
        before = time.time()
        there = self.ask("time")
        after = time.time()
        if there is not None:
            self.report.clock_seconds = there - (before + after) / 2
            self.report.error_seconds = (after - before) / 2

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer of the host; None if there is none."""
        return None if self.report.failure else self._exchange(json.dumps([question, *arguments]) + "\n")

    def _exchange(self, text: str) -> Any:
        process = self._process
        assert process is not None and process.stdin and process.stdout
        timer = threading.Timer(self._seconds, self._give_up)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # its last words are read below
                process.stdin.write(text)
                process.stdin.flush()
            for line in process.stdout:
                if line.startswith(probe.MARK):
                    return self._read(json.loads(line.removeprefix(probe.MARK)))
            self._ended(process.wait())
        finally:
            timer.cancel()
        return None

    def _give_up(self) -> None:
        self._late = True
        assert self._process is not None
        self._process.kill()

    def _read(self, message: Mapping[str, Any]) -> Any:
        if message.get("missing") in _FAILURES:
            self.report.failure = str(message["missing"])
        elif "error" in message:
            self.report.failure, self.report.detail = "crash", str(message["error"])
        return message.get("answer")

    def _ended(self, code: int) -> None:
        self._errors.seek(0)
        words = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        self.report.detail = words[-1] if words else f"{self._command[0]} ended with code {code}"
        if self._late:
            self.report.failure = "silent"
            self.report.detail = f"{self._seconds:g} s" + (f", {words[-1]}" if words else "")
        else:
            # ssh ends with 255 and srun with 1 if they do not get there; the interpreter would have said `ready`.
            lost = self._command[0] == "srun" or code == 255
            self.report.failure = "unreachable" if lost else "crash"


def _shell_command(needs: HostRequirements) -> str:
    """Return the command that starts the probe as a rank would be started: same folder, interpreter, environment."""
    folder, python = shlex.quote(str(needs.folder)), shlex.quote(needs.python)
    script = "; ".join(
        [
            f"cd -- {folder} 2>/dev/null || {_missing('folder')}",
            *(f"export {name}={shlex.quote(value)}" for name, value in needs.environment.items()),
            f"command -v {python} >/dev/null 2>&1 || {_missing('interpreter')}",
            f"exec {python} -c {shlex.quote(_BOOT)}",
        ]
    )
    # The user's shell on the host may be one that does not know this syntax.
    return f"exec sh -c {shlex.quote(script)}"


def _missing(name: str) -> str:
    line = probe.MARK + json.dumps({"missing": name})
    return f"{{ echo {shlex.quote(line)}; exit 3; }}"


_Together = Callable[[Callable[[_Session], None]], None]


def _compare_run_folders(sessions: Sequence[_Session], together: _Together, run_folder: str) -> None:
    name = f".megalite-preflight-{secrets.token_hex(8)}"
    if sessions[0].ask("mark", run_folder, name) != "":
        return  # its own error is among the facts

    def look(session: _Session) -> None:
        if session is not sessions[0]:
            session.report.shared = session.ask("sees", run_folder, name, _MARKER_SECONDS)

    together(look)
    sessions[0].report.shared = True


def _connect(sessions: Sequence[_Session], together: _Together, needs: HostRequirements) -> None:
    """Let every host connect to the first and to this machine, and the first to every host."""
    ports = list(needs.ports or (0,))
    first = sessions[0]

    def listen(session: _Session) -> None:
        chosen = session.report.facts["interfaces"].get(needs.interface, "")
        answer = session.ask("listen", session.token, ports, chosen) or {"port": 0, "error": ""}
        session.port, session.report.port_error = answer["port"], answer["error"]

    together(listen)
    own = probe.interfaces()
    here = probe.Listener(secrets.token_hex(8), address=own.get(needs.interface, ""))
    launcher = (_addresses(own, [], needs.interface), here.port, here.token)

    def reach(session: _Session) -> None:
        others = [launcher, *([_target(first, needs)] if first is not session and first.port else [])]
        ways = session.ask("reach", others) or []
        session.report.to_launcher, *rest = ways or [None]
        session.report.to_first = rest[0] if rest else None

    try:
        together(reach)
    finally:
        here.close()
    others = [session for session in sessions[1:] if session.port]
    ways = first.ask("reach", [_target(session, needs) for session in others]) or []
    for session, way in zip(others, ways, strict=False):
        session.report.from_first = way


def _target(session: _Session, needs: HostRequirements) -> tuple[list[str], int, str]:
    facts = session.report.facts
    addresses = _addresses(facts["interfaces"], facts["own_name"]["addresses"], needs.interface)
    return addresses, session.port, session.token


def _addresses(interfaces: Mapping[str, str], named: Sequence[str], chosen: str) -> list[str]:
    """Return the addresses at which other hosts may find a host: those of its interfaces, or of the chosen one.

    named: the addresses of the host's own name, which may be IPv6.
    """
    if chosen in interfaces:
        return [interfaces[chosen]]
    return [address for address in dict.fromkeys([*interfaces.values(), *named]) if not is_loopback(address)]
