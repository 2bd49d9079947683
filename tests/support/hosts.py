"""Hosts for tests: namespaces with their own network, processes, name and sshd, joined by a bridge; nothing else.

`with Hosts.up(2) as hosts: hosts[0].run(["ssh", "n1", "hostname"])`. The hosts n0, n1 ... share this machine's files
and have /run, /dev/shm and TMPDIR for themselves. No address outside of them can be reached. All ends with the process
that made them, however it ends: the kernel kills the hosts, and the keeper of the bridge removes their folder.
By hand: `python -m tests.support.hosts_by_hand up 2`, and in another terminal `... shell n0`.
"""

import atexit
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]


def plain_python() -> str:
    """Return this interpreter, by a link without a space where it has one in its path: deepspeed does not quote it."""
    if re.fullmatch(r"[\w./+-]+", sys.executable):
        return sys.executable
    folder = tempfile.mkdtemp(prefix="megalite-python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = Path(folder, "environment")
    link.symlink_to(Path(sys.executable).parents[1])
    return str(link / "bin" / Path(sys.executable).name)


PYTHON = plain_python()
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen", "/usr/sbin/sshd", "pdsh")
NETWORK = "10.77.0"
FIRST_HOST = 10  # n0 is 10.77.0.10
SSHD_CONFIG = """
Port 22
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin yes
PasswordAuthentication no
MaxStartups 200:30:400
MaxSessions 200
PidFile /run/sshd.pid
SetEnv TMPDIR=/run/tmp
"""
SSH_CONFIG = """
Host *
    IdentityFile /etc/ssh/key
    UserKnownHostsFile /etc/ssh/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
    LogLevel ERROR
"""
# How the commands of a host's own processes begin.
OWN = ("sleep 3600", "sshd:", "/usr/sbin/sshd", "/usr/sbin/munged", "/usr/sbin/slurm", "slurmctld:")
# The first process of a host: its mounts, its name, then the parent of processes whose parent has ended.
INIT = """
mkdir -p "$1/cgroup" && mount --rbind /sys/fs/cgroup "$1/cgroup"
mount -t sysfs sysfs /sys && mount --rbind "$1/cgroup" /sys/fs/cgroup
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm
mkdir -m 700 /run/tmp /run/home && mkdir /run/sshd
for file in hosts nsswitch.conf; do mount --bind "$1/$file" "/etc/$file"; done
mount --bind "$2/ssh" /etc/ssh
hostname "$3" && touch "$1/ready"
while :; do sleep 3600 & wait $!; done
"""


class HostsError(RuntimeError):
    """Hosts did not come up."""


def missing() -> str:
    """Return a sentence that says why no hosts can come up on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "hosts in namespaces need root"
    absent = [Path(each).name for each in PROGRAMS if shutil.which(each) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine; tests/launch/setup.sh installs the programs"
    namespaces = ["--net", "--pid", "--fork", "--mount-proc", "--uts", "--ipc"]
    bridge = ["ip", "link", "add", "name", "br0", "type", "bridge"]
    tried = subprocess.run(["unshare", *namespaces, *bridge], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine gives no namespaces with a bridge: {tried.stderr.strip()}"
    return ""


class Host:
    """One host of `Hosts`; commands run with the variables of `environment()` and those given."""

    def __init__(self, hosts: "Hosts", number: int) -> None:
        self.hosts = hosts
        self.number = number
        self.name = f"n{number}"
        self.address = f"{NETWORK}.{FIRST_HOST + number}"
        self.folder = hosts.folder / self.name
        self.log = self.folder / "log"
        self.pid = 0
        """The host's first process, as seen from outside; 0 if the host is down."""

    def command(
        self, arguments: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> list[str]:
        """Return the command that runs `arguments` on this host; `env` is added to `environment()`."""
        return entering(self.pid, arguments, env, cwd)

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        timeout: float = 120,
        check: bool = False,
        merged: bool = False,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end; with `check` fail with its output, `merged` puts stderr into stdout.

        A command that exceeds `timeout` is killed with its children, and the TimeoutExpired holds the output.
        """
        process = self.popen(arguments, env=env, cwd=cwd, merged=merged)
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException as error:
            self.kill_tree(process)
            output, errors = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                error.output, error.stderr = output, errors
                text = f"{self.name}: no end in {timeout:g} s: {shlex.join(map(str, arguments))}"
                raise AssertionError(f"{text}\n{output}\n{errors or ''}") from error
            raise
        done = subprocess.CompletedProcess(list(map(str, arguments)), process.returncode, output, errors)
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: exit {done.returncode}: {done.args}\n{output}\n{errors or ''}"
            )
        return done

    def popen(
        self,
        arguments: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        merged: bool = True,
        **options: Any,
    ) -> "subprocess.Popen[str]":
        """Start a command. Its Popen is that of nsenter, which passes on the exit status: signal with `send`."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True} | options
        options.setdefault("stderr", subprocess.STDOUT if merged else subprocess.PIPE)
        return subprocess.Popen(self.command(arguments, env, cwd), start_new_session=True, **options)

    def send(self, process: "subprocess.Popen[str]", number: signal.Signals) -> None:
        """Send a signal to the program that `popen` started."""
        for child in children(process.pid):
            os.kill(child, number)

    def kill_tree(self, process: "subprocess.Popen[str]") -> None:
        """Kill what `popen` started and all its descendants that still have it as ancestor."""
        found = [process.pid]
        for each in found:
            found += children(each)
        for each in reversed(found):
            kill(each)

    def processes(self, containing: str = "") -> dict[int, str]:
        """Return id (as seen from outside) -> command line of the host's processes whose command contains a text.

        Left out: zombies, and what belongs to the host itself (its first process, sshd, munge and SLURM's daemons).
        """
        found = {}
        for pid in self._all():
            command = command_line(pid)
            if pid != self.pid and command and not command.startswith(OWN) and containing in command:
                found[pid] = command
        return found

    def kill(self, containing: str, number: signal.Signals = signal.SIGKILL) -> list[int]:
        """Signal the host's processes whose command contains a text; return their ids."""
        found = list(self.processes(containing))
        for pid in found:
            kill(pid, number)
        return found

    def link(self, up: bool) -> None:
        """Plug the host's network cable in or out, at the switch."""
        state = "up" if up else "down"
        run(
            ["nsenter", "-t", str(self.hosts.keeper.pid), "-n", "ip", "link", "set", f"p{self.number}", state]
        )

    def die(self) -> None:
        """Kill the whole host: a machine that lost its power."""
        self.hosts.kill_host(self)

    def write_hosts(self, text: str) -> None:
        """Replace this host's /etc/hosts."""
        (self.folder / "hosts").write_text(text)

    def private(self, folder: Path) -> None:
        """Put an empty folder of this host's own over `folder`."""
        self.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)

    def _all(self) -> Iterator[int]:
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "ns" / "pid").readlink() == own:
                    yield int(entry.name)
            except OSError:
                continue


class Hosts(Sequence[Host]):
    """Some hosts on one network; see the module."""

    def __init__(self, count: int, own_address: str | None = None) -> None:
        if reason := missing():
            raise HostsError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix=f"megalite-hosts-{os.getpid()}-"))
        self._own_address = own_address
        self._holders: list[subprocess.Popen[bytes]] = []
        self._hosts = [Host(self, number) for number in range(count)]
        self.keeper = self._keeper()
        try:
            self._start()
        except BaseException:
            self.down()
            raise

    @classmethod
    def up(cls, count: int = 2, own_address: str | None = None) -> "Hosts":
        """Bring up hosts n0, n1, ...

        `own_address`: what each host's /etc/hosts says of its own name, as Debian's "127.0.1.1"; default: its address.
        """
        return cls(count, own_address)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: Any) -> Any:
        return self._hosts[number]

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def hostfile(self, slots: int = 2) -> Path:
        """Write a hostfile in DeepSpeed's form and return its path."""
        path = self.folder / "hostfile"
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self))
        return path

    def processes(self, containing: str = "") -> dict[int, str]:
        """As of a host, over all hosts that live."""
        return {
            pid: command for host in self if host.pid for pid, command in host.processes(containing).items()
        }

    def kill_host(self, host: Host) -> None:
        kill(host.pid)
        self._holders[host.number].wait(timeout=PATIENCE)
        host.pid = 0

    def down(self) -> None:
        """End all hosts and remove their folder; safe to call twice."""
        for host, holder in zip(self, self._holders, strict=False):
            if host.pid:  # the holder ends after it has reaped the host's first process
                kill(host.pid)
            else:
                holder.kill()
        for holder in self._holders:
            holder.wait(timeout=PATIENCE)
        for host in self:
            host.pid = 0
        if self.keeper.stdin:
            self.keeper.stdin.close()
        self.keeper.wait(timeout=PATIENCE)

    def _keeper(self) -> "subprocess.Popen[bytes]":
        """Start the process whose network namespace has the bridge; its input ends when this process does."""
        script = 'cd /; trap "" INT TERM HUP; read -r _; rm -rf --one-file-system "$1"'
        return subprocess.Popen(
            ["unshare", "--net", "bash", "-c", script, "keeper", self.folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _start(self) -> None:
        self._write_ssh()
        for host in self:
            self._write_files(host)
            with host.log.open("w") as log:
                command = self._holder_command(host)
                self._holders.append(subprocess.Popen(command, stderr=log, start_new_session=True))
        for host in self:
            host.pid = self._first_process(host)
        self._connect()
        for host in self:
            wait_until((host.folder / "ready").exists, f"{host.name} is not ready; see {host.log}")
            host.run(["/usr/sbin/sshd"], check=True)

    def _holder_command(self, host: Host) -> list[str]:
        namespaces = ["--net", "--pid", "--mount-proc", "--uts", "--ipc", "--mount"]
        first = ["bash", "-c", INIT, "init", str(host.folder), str(self.folder), host.name]
        return [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--fork",
            "--kill-child=KILL",
            *namespaces,
            *first,
        ]

    def _first_process(self, host: Host) -> int:
        holder = self._holders[host.number]
        wait_until(
            lambda: bool(children(holder.pid)) or holder.poll() is not None, f"{host.name} does not start"
        )
        if holder.poll() is not None:
            raise HostsError(f"{host.name} ended while it started: {host.log.read_text()}")
        return children(holder.pid)[0]

    def _connect(self) -> None:
        bridge = ["link add name br0 type bridge", "link set br0 up"]
        for host in self:
            bridge.append(f"link add name p{host.number} type veth peer name eth0 netns {host.pid}")
            bridge.append(f"link set p{host.number} master br0 up")
        own, keepers = Path("/proc/self/ns/net"), Path(f"/proc/{self.keeper.pid}/ns/net")
        wait_until(lambda: keepers.readlink() != own.readlink(), "the bridge has no namespace")
        run(["nsenter", "-t", str(self.keeper.pid), "-n", "ip", "-batch", "-"], "\n".join(bridge))
        for host in self:
            own = f"addr add {host.address}/24 dev eth0\nlink set eth0 up\nlink set lo up"
            run(["nsenter", "-t", str(host.pid), "-n", "ip", "-batch", "-"], own)

    def _write_files(self, host: Host) -> None:
        host.folder.mkdir()
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for each in self:
            address = self._own_address if each is host and self._own_address else each.address
            lines.append(f"{address} {each.name}")
        host.write_hosts("\n".join(lines) + "\n")
        (host.folder / "nsswitch.conf").write_text(
            "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
        )

    def _write_ssh(self) -> None:
        ssh = self.folder / "ssh"
        ssh.mkdir()
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests", "-f", str(ssh / "key")])
        public = (ssh / "key.pub").read_text().strip()
        names = (
            ",".join(each for host in self for each in (host.name, host.address))
            + ",localhost,127.0.0.1,127.0.1.1"
        )
        (ssh / "known_hosts").write_text(f"{names} {public}\n")
        (ssh / "sshd_config").write_text(SSHD_CONFIG)
        (ssh / "ssh_config").write_text(SSH_CONFIG)


def environment() -> dict[str, str]:
    """Return the variables that a command on a host begins with."""
    path = f"{Path(PYTHON).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    values = {"PATH": path, "HOME": "/run/home", "USER": "root", "LANG": "C.UTF-8", "TMPDIR": "/run/tmp"}
    # Where the tested working tree is not the installed one.
    if "PYTHONPATH" in os.environ:
        values["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return values


def entering(
    pid: int, arguments: Sequence[str | Path], env: Mapping[str, str] | None, cwd: Path
) -> list[str]:
    """Return the command that runs `arguments` on the host with this first process."""
    variables = [f"{name}={value}" for name, value in (environment() | dict(env or {})).items()]
    inside = ["env", "-i", "-C", str(cwd), *variables, *map(str, arguments)]
    return ["nsenter", "-t", str(pid), "-a", "--", *inside]


def run(arguments: Sequence[str], text: str = "") -> None:
    """Run a command on this machine; HostsError with its output if it fails."""
    done = subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise HostsError(f"{shlex.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def command_line(pid: int) -> str:
    """Return a process's arguments, joined by blanks; empty for a zombie and for one that has ended."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .rstrip(b"\0")
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    except OSError:
        return ""
