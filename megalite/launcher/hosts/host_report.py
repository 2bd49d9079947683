"""The preflight's findings about one host, and the rules that turn all hosts' facts into them. Starts nothing."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megalite.errors import counted, listed
from megalite.launcher.hosts.probe import digest

Level = Literal["error", "warning", "note"]

GIB = 2**30
_LEAST_SHARED_MEMORY_BYTES = GIB // 4
_LEAST_DISK_BYTES = GIB
_MOST_CLOCK_SECONDS = 1.0


@dataclass(frozen=True)
class HostRequirements:
    """The needs of a job on every host; launch_interface: the setting launch.interface.

    folder: the ranks' working folder. python: their interpreter. environment: the variables that travel with the ranks.
    ports: where ranks listen; None: any free port. rank_bytes: the memory that no rank can do without.
    """

    folder: Path
    python: str
    run_file: Path | None = None
    run_folder: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    ports: range | None = None
    launch_interface: str = "auto"
    rank_bytes: float = 0.0

    @cached_property
    def run_digest(self) -> str:
        """The digest of this machine's run file; "" without one."""
        return digest(str(self.folder / self.run_file))["digest"] if self.run_file else ""

    @property
    def interface(self) -> str:
        """The network interface that the user chose for collectives; "" if the route decides."""
        if self.launch_interface != "auto":
            return self.launch_interface
        of_nccl = self.environment.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
        chosen = self.environment.get("GLOO_SOCKET_IFNAME") or of_nccl
        # NCCL also takes lists, prefixes and exclusions, which only NCCL can resolve.
        return chosen if chosen.replace("_", "").replace(".", "").isalnum() else ""


@dataclass
class HostReport:
    """One host's answers; `failure` says why there are none, or no more.

    failure: "" or "unreachable", "folder", "interpreter", "crash" (the interpreter or the probe ended), "silent".
    detail: the words of ssh, srun or the interpreter. facts: `probe.facts`. clock_seconds: ahead of this machine's
    clock; error_seconds: its uncertainty. shared: the run folder is the first host's; None if not tried.
    port_error: why no port is free. to_first, from_first, to_launcher: `probe.reach`; None if not tried.
    """

    host: str
    slots: int
    failure: str = ""
    detail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    clock_seconds: float | None = None
    error_seconds: float = 0.0
    port_error: str = ""
    to_first: Mapping[str, str] | None = None
    from_first: Mapping[str, str] | None = None
    to_launcher: Mapping[str, str] | None = None
    shared: bool | None = None


@dataclass(frozen=True)
class HostFinding:
    """A problem of one host; row: the line of the table that shows it. Errors stop a launch."""

    host: str
    row: str
    message: str
    remedy: str = ""
    level: Level = "error"


def judge(reports: Sequence[HostReport], needs: HostRequirements) -> list[HostFinding]:
    """Return the findings of all hosts."""
    findings = [each for report in reports for each in _absent(report, needs)]
    answering = [report for report in reports if not report.failure]
    for report in answering:
        for rule in (_installed, _files, _machine, _network):
            findings += rule(report, needs)
    if answering:
        findings += _connections(answering, reports[0])
        findings += _clocks(answering)
        for row, value, remedy, level in _COMPARED:
            findings += _different(answering, row, value, remedy, level)
        findings += _unlike_cards(answering)
    return list(dict.fromkeys(findings))


def _absent(report: HostReport, needs: HostRequirements) -> Iterator[HostFinding]:
    """Yield why a host gave no facts."""
    host, detail = report.host, report.detail
    if report.failure == "unreachable":
        remedy = f"try `ssh -o BatchMode=yes {host} true`: it must end without a question"
        if "srun" in detail:
            remedy = f"try `srun --overlap --nodes=1 --nodelist={host} true`"
        yield HostFinding(host, "reachable", f"cannot be reached: {detail}", remedy)
    elif report.failure == "silent":
        remedy = "look whether the host is up and its disks answer, or allow more with --preflight-seconds"
        yield HostFinding(host, "reachable", f"gave no answer in time: {detail}", remedy)
    elif report.failure == "folder":
        remedy = "make the folder there, or launch from a folder that all hosts share"
        yield HostFinding(host, "folder", f"the working folder {needs.folder} does not exist", remedy)
    elif report.failure == "interpreter":
        remedy = "install the same environment at the same path, or put it into a folder that all hosts share"
        yield HostFinding(host, "python", f"there is no interpreter {needs.python}", remedy)
    elif report.failure == "crash":
        remedy = f"run `{needs.python} --version` there"
        yield HostFinding(host, "python", f"{needs.python} gave no facts: {detail}", remedy)


def _installed(report: HostReport, needs: HostRequirements) -> Iterator[HostFinding]:
    facts = report.facts
    if hidden := facts["megalite_hidden_by"]:
        message = f"the folder {hidden} has no __init__.py and hides the installed package megalite"
        yield HostFinding(report.host, "megalite", message, f"launch from another folder than {needs.folder}")
    elif not facts["megalite"]:
        message = f"megalite cannot be imported by {needs.python}: {facts['megalite_error']}"
        remedy = f"install it there: `{needs.python} -m pip install ...`, or launch from a shared checkout"
        yield HostFinding(report.host, "megalite", message, remedy)
    if not facts["torch"]:
        remedy = f"install it there: `{needs.python} -m pip install torch`"
        yield HostFinding(report.host, "torch", f"torch is not installed for {needs.python}", remedy)


def _files(report: HostReport, needs: HostRequirements) -> Iterator[HostFinding]:
    if error := report.facts["run_file"]["error"]:
        remedy = "copy it there, or put it into a folder that all hosts share"
        yield HostFinding(report.host, "run file", f"{needs.run_file} cannot be read: {error}", remedy)
    elif report.facts["run_file"]["digest"] != needs.run_digest:
        message = f"{needs.run_file} has another content than on this machine"
        yield HostFinding(
            report.host, "run file", message, "copy this machine's to it, or use a shared folder"
        )
    if error := report.facts["disk_error"]:
        remedy = "change its owner or mode, or choose another run.folder"
        yield HostFinding(report.host, "run folder", f"{error}, and run.folder is {needs.run_folder}", remedy)
    if report.shared is False:
        message = (
            f"run.folder {needs.run_folder} is another folder than the first host's; a checkpoint needs one"
        )
        yield HostFinding(
            report.host, "run folder", message, "use a folder of a file system that all hosts share"
        )


def _machine(report: HostReport, needs: HostRequirements) -> Iterator[HostFinding]:
    facts, host, slots = report.facts, report.host, report.slots
    memory, shared, disk = (facts[f"{name}_bytes"] for name in ("memory", "shared_memory", "disk"))
    if 0 < facts["gpus"] < slots:
        message = f"{slots} slots, but {counted(facts['gpus'], 'GPU')}"
        yield HostFinding(host, "GPUs", message, f"write slots={facts['gpus']}")
    if facts["cores"] < slots:
        message = f"{slots} slots share {counted(facts['cores'], 'core')}: ranks take turns"
        yield HostFinding(host, "cores", message, f"write slots={facts['cores']}", "warning")
    total, needed = facts.get("total_memory_bytes"), needs.rank_bytes * slots
    if total is not None and not (facts["gpus"] or facts.get("accelerator")) and needed > total:
        message = (
            f"{counted(slots, 'rank')} need {size(needed)} or more for weights, gradients, optimizer and one micro "
            f"batch, and the host has {size(total)}"
        )
        yield HostFinding(
            host, "memory", message, "use more hosts, or raise parallel.tensor or parallel.pipeline"
        )
    elif memory is not None and memory < GIB * slots:
        message = f"{size(memory)} of memory are free for {counted(slots, 'rank')}"
        yield HostFinding(host, "memory", message, "end other programs there", "warning")
    if shared is not None and shared < _LEAST_SHARED_MEMORY_BYTES:
        message = f"{size(shared)} of shared memory are free; NCCL needs some for each pair of ranks"
        yield HostFinding(host, "/dev/shm", message, "start the container with --shm-size=8g", "warning")
    if shared is None:
        yield HostFinding(host, "/dev/shm", "there is no /dev/shm", "mount a tmpfs there", "warning")
    if disk is not None and disk < _LEAST_DISK_BYTES:
        message = f"the disk of run.folder {needs.run_folder} has {size(disk)} left"
        yield HostFinding(
            host, "disk", message, "remove old checkpoints, or choose another run.folder", "warning"
        )


def _network(report: HostReport, needs: HostRequirements) -> Iterator[HostFinding]:
    interfaces, own = report.facts["interfaces"], report.facts["own_name"]
    if needs.interface and needs.interface not in interfaces:
        message = f"there is no network interface {needs.interface}; it has {', '.join(interfaces)}"
        remedy = (
            'set launch.interface to one that all hosts have, or to "auto" (also without GLOO_SOCKET_IFNAME)'
        )
        yield HostFinding(report.host, "address", message, remedy)
    loopback = [each for each in own["addresses"] if is_loopback(each)]
    if loopback and report.to_launcher is not None:
        message = (
            f"the host's own name has the address {loopback[0]} in its /etc/hosts; megalite does not use it"
        )
        yield HostFinding(report.host, "address", message, "", "note")
    if report.port_error:
        remedy = "end the program that uses them, or choose other ports"
        yield HostFinding(report.host, "address", report.port_error, remedy)


def _connections(answering: Sequence[HostReport], first: HostReport) -> Iterator[HostFinding]:
    remedy = "open these ports between the hosts, or choose another network with launch.interface"
    for report in answering:
        ways = (
            ("to first", report.to_first, f"{report.host} cannot connect to {first.host}"),
            ("from first", report.from_first, f"{first.host} cannot connect to {report.host}"),
            ("to launcher", report.to_launcher, f"{report.host} cannot connect to this machine"),
        )
        for row, way, message in ways:
            if way is not None and way["error"]:
                yield HostFinding(report.host, row, f"{message}: {way['error']}", remedy)
            elif way is not None and is_loopback(way["own"]) and first is not report and row == "to first":
                message = f"it reaches {first.host} through {way['own']}, an address of this host alone"
                remedy = f"remove the line with 127.* and {first.host} from its /etc/hosts"
                yield HostFinding(report.host, "address", message, remedy)


def _clocks(answering: Sequence[HostReport]) -> Iterator[HostFinding]:
    for report in answering:
        ahead = clock_ahead(report, answering[0])
        if ahead is None or abs(ahead) <= _MOST_CLOCK_SECONDS + report.error_seconds:
            continue
        way = "ahead of" if ahead > 0 else "behind"
        message = f"its clock is {abs(ahead):.1f} s {way} that of {answering[0].host}; times in logs mislead"
        yield HostFinding(report.host, "clock", message, "start chrony or ntpd there", "warning")


def clock_ahead(report: HostReport, first: HostReport) -> float | None:
    """Return the seconds by which a host's clock is ahead of the first host's."""
    if report.clock_seconds is None or first.clock_seconds is None:
        return None
    return report.clock_seconds - first.clock_seconds


_Value = Callable[[HostReport], str]
_SAME = "install the same version on all hosts, or use one environment in a folder that they share"
_COMPARED: tuple[tuple[str, _Value, str, Level], ...] = (
    ("python", lambda report: str(report.facts["python"]), _SAME, "warning"),
    ("megalite", lambda report: str(report.facts["megalite"]), _SAME, "error"),
    ("torch", lambda report: str(report.facts["torch"]), _SAME, "error"),
    ("deepspeed", lambda report: str(report.facts["deepspeed"]), _SAME, "error"),
    ("transformers", lambda report: str(report.facts["transformers"]), _SAME, "warning"),
    (
        "library",
        lambda report: str(report.facts["library"]),
        "build it on that host: python setup.py build_ext --inplace, or copy the first host's",
        "error",
    ),
)


def usual(answering: Sequence[HostReport], value: _Value) -> str:
    """Return the most frequent value; of equally frequent ones, that of the earliest host."""
    return Counter(map(value, answering)).most_common(1)[0][0]


def _different(
    answering: Sequence[HostReport], row: str, value: _Value, remedy: str, level: Level
) -> Iterator[HostFinding]:
    # A host without megalite or torch has its own error.
    answering = [
        report for report in answering if value(report) or row not in ("megalite", "torch", "library")
    ]
    if not answering:
        return
    expected = usual(answering, value)
    others = [report.host for report in answering if value(report) == expected]
    for report in answering:
        if value(report) != expected:
            own, theirs = value(report) or "not installed", expected or "not installed"
            message = f"{row} is {own}, but {theirs} on {listed(others)}"
            yield HostFinding(report.host, row, message, remedy, level)


def _unlike_cards(answering: Sequence[HostReport]) -> Iterator[HostFinding]:
    with_cards = [report.host for report in answering if report.facts["gpus"]]
    for report in answering:
        if with_cards and not report.facts["gpus"]:
            message = f"no GPU is visible, but {listed(with_cards)} have some"
            yield HostFinding(report.host, "GPUs", message, "run nvidia-smi there, or --exclude the host")


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def size(count: float) -> str:
    """Return bytes as text in GiB or MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
