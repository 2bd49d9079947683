"""How the ranks of a launcher meet, and agree on settings and software, before torch is imported."""

from megalite.config.output.dotted_keys import flat_settings
from megalite.config.sections.schema import RunConfig
from megalite.errors import LaunchError, MegaliteError
from megalite.launcher.control.connection import RendezvousLimits
from megalite.launcher.control.member import NO_CALLS, RankCalls
from megalite.launcher.control.progress import Activity, progress
from megalite.launcher.control.rank_process import RankEnd
from megalite.launcher.control.rendezvous import AgentStore, Meeting, meet
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.environment import prepare_process, variables
from megalite.launcher.rank.placement import placement_warning
from megalite.launcher.rank.versions import software
from megalite.monitor.console import announce
from megalite.planner.experts import exchange_of_a_token
from megalite.train.start import meeting_line

_SAME_START = (
    "the ranks were not started with the same settings and software; give every host the same run file, flags and "
    "Python environment:"
)
_BRIEFLY = RendezvousLimits(rendezvous_seconds=10.0)
"""For a rank that fails before it knows its settings."""


def meet_ranks(info: RankInfo, config: RunConfig, end: RankEnd) -> Meeting:
    """Meet all ranks of the job; end it, on all of them, if two have other settings or other software.

    Raises LaunchError if this rank does not reach the others.
    """
    progress.begin(Activity.MEETING)
    meeting = meet(
        info,
        config.rendezvous_limits,
        RankCalls(announce, progress.heartbeat, end.job_ended),
        agent_store=_agent_store,
        layout=config.layout,
        interface=config.launch.interface,
    )
    end.judge = meeting
    meeting.member.agree("start", flat_settings(config) | software(), _SAME_START)
    if info.rank == 0:
        if warning := placement_warning(config.layout, meeting.hosts, exchange_of_a_token(config)):
            announce(f"warning: {warning}")
        announce(
            meeting_line(config, meeting.hosts, meeting.meets_at, variables().get("GLOO_SOCKET_IFNAME", ""))
        )
    return meeting


def tell_others(info: RankInfo, error: MegaliteError) -> bool:
    """Report an error of a rank that could not read its settings to the other ranks; whether they got to know it."""
    try:
        prepare_process(info=info)
        meeting = meet(info, _BRIEFLY, NO_CALLS, agent_store=_agent_store)
    except (LaunchError, OSError):
        return False
    text = f"rank {info.rank} on {info.node}: {error}"
    return meeting.stop(text, error.exit_code) is not None


def _agent_store(info: RankInfo) -> AgentStore:
    # Imports torch, whose store it is.
    from megalite.parallel.agent_store import TorchrunStore

    return TorchrunStore(info)
