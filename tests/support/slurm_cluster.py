"""A real SLURM on the hosts of a test: munge and slurmd on each, the controller on n0.

`slurm = SlurmCluster.up(hosts); slurm.wait(slurm.submit("run.sbatch"))`. It has two partitions: low, the default, and
high, whose jobs pre-empt those of low, which are requeued. It ends with the hosts.
"""

import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.hosts import ROOT, Host, Hosts, HostsError
from tests.support.waiting import PATIENCE

PROGRAMS = (
    "/usr/sbin/munged",
    "/usr/sbin/slurmctld",
    "/usr/sbin/slurmd",
    "srun",
    "sbatch",
    "scontrol",
    "squeue",
)
# cred_expire: a requeued job begins after 6 s instead of 121 s.
CONFIG = """
ClusterName=tests
SlurmctldHost=n0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool-%n
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=5
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
NodeName=n[0-{last}] CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} OverSubscribe=NO
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF OverSubscribe=NO
"""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY"}


def missing() -> str:
    """Return a sentence that says which of SLURM's programs is absent; empty if all are there."""
    absent = [Path(each).name for each in PROGRAMS if shutil.which(each) is None]
    return f"no {', '.join(absent)} on this machine; tests/launch/setup.sh installs SLURM" if absent else ""


class SlurmCluster:
    """SLURM on hosts; ends with them."""

    def __init__(self, hosts: Hosts, cpus: int, grace: int) -> None:
        if reason := missing():
            raise HostsError(reason)
        self.hosts = hosts
        self.head: Host = hosts[0]
        self._config = hosts.folder / "slurm"
        if self._config.exists():
            raise HostsError("SLURM runs on these hosts already")
        self._config.mkdir()
        last = len(hosts) - 1
        (self._config / "slurm.conf").write_text(CONFIG.format(last=last, cpus=cpus, grace=grace))
        # Without it slurmd looks for a mounted cgroup/v2.
        (self._config / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (hosts.folder / "munge.key").write_bytes(secrets.token_bytes(128))

    @classmethod
    def up(cls, hosts: Hosts, cpus: int = 4, grace: int = 10) -> "SlurmCluster":
        """Start SLURM and wait until all nodes are idle; cpus: of each node, grace: a pre-empted job's seconds."""
        cluster = cls(hosts, cpus, grace)
        for host in hosts:
            cluster.start_node(host)
        cluster._wait_idle()
        return cluster

    def start_node(self, host: Host) -> None:
        """Start munge and SLURM's daemons on a host."""
        script = """
            mkdir -p /run/munge /run/slurm/state && install -m 400 "$1/munge.key" /run/munge/key
            mount --bind "$1/slurm" /etc/slurm
            /usr/sbin/munged --force --key-file=/run/munge/key --socket=/run/munge/socket \
                --pid-file=/run/munge/pid --log-file=/run/munge/log --seed-file=/run/munge/seed
            if [ "$2" = n0 ]; then /usr/sbin/slurmctld; fi
            /usr/sbin/slurmd -N "$2"
        """
        host.run(["bash", "-ec", script, "start", self.hosts.folder, host.name], cwd=Path("/"), check=True)

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        check: bool = True,
    ) -> str:
        """Run one of SLURM's commands on n0 and return its output, stderr included."""
        return self.head.run(arguments, env=env, cwd=cwd, timeout=PATIENCE, check=check, merged=True).stdout

    def submit(self, *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> int:
        """sbatch with these arguments; return the job's id."""
        output = self.run(["sbatch", *arguments], env=env, cwd=cwd)
        found = re.search(r"Submitted batch job (\d+)", output)
        assert found, output
        return int(found[1])

    def job(self, job: int | str) -> dict[str, str]:
        """Return what `scontrol show job` says: JobState, ExitCode, Restarts, NodeList, ..."""
        text = self.run(["scontrol", "--oneliner", "show", "job", str(job)])
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job: int | str) -> str:
        return self.job(job)["JobState"]

    def wait(self, job: int | str, *states: str, within: float = PATIENCE) -> dict[str, str]:
        """Wait until a job is in one of `states` (default: it has ended); return what `job` says.

        Fails at once, with what it says, if the job has ended in another state. within: the seconds without a change of
        its state or of its log.
        """
        wanted = set(states) or ENDED
        last: tuple[str, int] | None = None
        while True:
            seen = self.job(job)
            log = Path(seen.get("StdOut", ""))
            now = seen["JobState"], log.stat().st_size if log.is_file() else 0
            if now != last:
                last, end = now, time.monotonic() + within
            if seen["JobState"] in wanted:
                return seen
            ended = seen["JobState"] in ENDED and not wanted & {"PENDING", "RUNNING"}
            if ended or time.monotonic() > end:
                raise AssertionError(
                    f"job {job} is {seen['JobState']}, not {sorted(wanted)}: {seen}\n{self.logs()}"
                )
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the last lines of the controller's and the nodes' logs."""
        parts = []
        for host in self.hosts:
            if host.pid:
                names = "/run/slurm/slurmctld.log /run/slurm/slurmd.log"
                parts.append(
                    f"{host.name}:\n" + host.run(["bash", "-c", f"tail -n 8 {names} 2>/dev/null"]).stdout
                )
        return "\n".join(parts)

    def _wait_idle(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            output = self.run(
                ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%T"], check=False
            )
            if output.split() == ["idle"] * len(self.hosts):
                return
            if time.monotonic() > end:
                raise HostsError(f"SLURM's nodes are not idle after {PATIENCE:g} s: {output}\n{self.logs()}")
            time.sleep(0.05)
