"""The first lines of a run, printed before torch is imported, and the line about its data."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil

from megalite.config.output.summary import (
    batch_line,
    context_line,
    layout_line,
    length_line,
    parameters_line,
    rank_share_line,
    shape_line,
)
from megalite.config.sections.schema import RunConfig
from megalite.data.batches.stream_files import StreamFile
from megalite.errors import counted, listed
from megalite.launcher.rank.detect import RankInfo
from megalite.launcher.rank.environment import watched_by_launcher
from megalite.monitor.preparation import megabytes
from megalite.version import __version__

_HOSTS_NAMED = 16


def start_lines(config: RunConfig, info: RankInfo | None, threads: int) -> Iterator[str]:
    """Yield what the run will do: model, layout, processes, batch, length, precision, folder."""
    ranks = config.layout.world_size
    facts = {
        "model": shape_line(config),
        "parameters": "; ".join(filter(None, (parameters_line(config), rank_share_line(config)))),
        "processes": f"{_processes(config, info)}, {counted(threads, 'thread')}{' each' * (ranks > 1)}",
        "layout": layout_line(config),
        "context": context_line(config),
        "batch": batch_line(config),
        "length": length_line(config),
        "precision": config.training.precision,
        "run folder": config.run.folder,
    }
    yield f"megalite {__version__}"
    facts = {name: fact for name, fact in facts.items() if fact}
    width = max(map(len, facts)) + 2
    for name, fact in facts.items():
        yield f"  {name:<{width}}{fact}"


def data_line(config: RunConfig, *, samples: int, held_out: int, steps: int) -> str:
    """Return sequences, steps per epoch and epochs of a run, and a note where one step reads the data several times.

    samples: sequences of an epoch. held_out: sequences of a validation. steps: the last step of the run.
    """
    length, batch = config.training.sequence_length, config.batch.global_batch_size
    per_epoch, up_to = ceil(samples / batch), "up to " if config.data.length_buckets else ""
    line = f"data: {counted(samples, 'sequence')} of {up_to}{length:,} tokens, "
    line += f"{counted(per_epoch, 'step')} per epoch; "
    line += f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} {steps * batch / samples:.3g} epochs"
    line += _validated(held_out)
    if batch >= 2 * samples:
        line += (
            f"\nnote: each step reads the data {round(batch / samples):,} times: training.global_batch_size = "
            f"{batch:,}, and the data has {counted(samples, 'sequence')}"
        )
    return line


def stream_line(config: RunConfig, files: Sequence[StreamFile], *, held_out: int) -> str:
    """Return what a run streams. held_out: sequences of a validation."""
    size = megabytes(sum(file.size_bytes for file in files))
    lanes = config.batch.global_batch_size
    line = f"data: streams {size} in {counted(len(files), 'file')}, {counted(lanes, 'part')} at once (data.streaming)"
    return line + _validated(held_out)


def _validated(held_out: int) -> str:
    return f"; validation on {counted(held_out, 'sequence')}" if held_out else ""


def meeting_line(config: RunConfig, hosts: Sequence[str], meets_at: str, interface: str) -> str:
    """Return where the ranks of a launcher meet, and the limits of time. hosts: of each rank."""
    counts = listed([f"{ranks} on {host}" for host, ranks in Counter(hosts).items()], most=_HOSTS_NAMED)
    over = f" ({interface})" if interface else ""
    launch = config.launch
    return (
        f"all ranks are here: {counts}; they meet at {meets_at}{over}; limits: {launch.collective_seconds:g} s in a "
        f"collective, {launch.heartbeat_seconds:g} s for a host that does not answer"
    )


def _processes(config: RunConfig, info: RankInfo | None) -> str:
    ranks = config.layout.world_size
    if info is None:
        return f"{counted(ranks, 'process')} on this machine"
    by = "megalite launch" if watched_by_launcher() else info.launcher
    return f"{counted(ranks, 'process')} on {counted(info.hosts, 'host')}, started by {by}"
