"""Time and memory of the control path of one rank at thousands of ranks: no weights, no network, one machine.

    python -m benchmarks.control_path [--quick] [--sockets 16384]

A Llama 3.1 405B on tensor 8 x pipeline 16 x data 8, 128 and 1024: 1,024, 16,384 and 131,072 ranks. Each step runs in a
process of its own, forked from one that has imported torch: its seconds of a core, its megabytes beyond the imports.
Process groups are torch's fake ones, tensors are names and shapes. The coordinator has real sockets, as many as
--sockets says: two processes with half of the ranks each connect, compare settings, and hear the verdict.

published    rank 0: the tables of all ranks merged, checked for coverage, written, renamed; ZeRO cuts the states.
opened       one rank: the manifest read and checked, as before loading.
"""

import argparse
import gc
import json
import multiprocessing
import os
import random
import resource
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import report
from megalite.checkpoint.folder import partial_name, published_name
from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import split_flat_range
from megalite.checkpoint.unpublished import Draft, ShardRow, file_table
from megalite.config.load import load_run
from megalite.data.batches.blend import SampleOrder
from megalite.data.batches.loader import BatchShare, StepLoader
from megalite.data.files.token_file import TokenFile, TokenWriter
from megalite.launcher.control.coordinator import Coordinator
from megalite.launcher.control.messages import LineReader, Verdict, encode
from megalite.launcher.control.rank_states import CoordinatedJob
from megalite.launcher.hosts.backends import Job
from megalite.launcher.hosts.commands import ssh
from megalite.launcher.hosts.hostfile import read_hostfile
from megalite.launcher.hosts.job_hosts import Hosts, place_ranks
from megalite.launcher.hosts.programs import Programs
from megalite.launcher.rank.placement import placement_warning
from megalite.parallel.mesh import ParallelMesh
from megalite.planner.cluster import Cluster
from megalite.planner.search import search
from megalite.topology.axes import Layout
from megalite.topology.parameters import stage_parameters
from megalite.topology.place import RankPlace
from megalite.topology.schedule_timeline import orders_of
from megalite.topology.shape import ModelShape
from megalite.topology.stages import balanced_split, pipeline_split
from megalite.topology.transfers import stage_programs

SHAPE = ModelShape(128256, 16384, 53248, 126, 128, 8, 128)
MODEL = {
    "model.hidden_size": 16384,
    "model.intermediate_size": 53248,
    "model.num_hidden_layers": 126,
    "model.num_attention_heads": 128,
    "model.num_key_value_heads": 8,
    "model.vocab_size": 128256,
    "model.max_position_embeddings": 8192,
    "training.sequence_length": 8192,
    "training.micro_batch_size": 1,
    "training.steps": 100,
}
TENSOR, STAGES, CARDS = 8, 16, 8
DATA = (8, 128, 1024)
GLOBAL_BATCH = 16384
STATES = ("master", "exp_avg", "exp_avg_sq")
CONSUMED = 10**9


@dataclass(frozen=True)
class Figures:
    """The seconds and bytes of one step. note: counts that explain it."""

    seconds: float
    megabytes: float
    note: str = ""


def layout_of(data: int) -> Layout:
    return Layout(STAGES, data, TENSOR)


def places(layout: Layout) -> str:
    """Find one rank's place and its peers of every role."""
    peers = RankPlace(layout, layout.world_size // 2 + 3).peers
    return f"{sum(map(len, peers.values()))} peers"


def mesh(layout: Layout) -> str:
    """Make one rank's process groups."""
    dist.init_process_group(
        "fake", store=FakeStore(), rank=layout.world_size // 2 + 3, world_size=layout.world_size
    )
    groups = ParallelMesh.over_world(layout).groups
    return f"{len({id(group.group) for group in groups.values()})} groups"


def share(layout: Layout) -> str:
    """Find what one rank holds of its stage's parameters, and what of that it writes."""
    place = RankPlace(layout, layout.world_size // 2 + 3)
    parameters = list(stage_parameters(SHAPE, pipeline_split(SHAPE.num_hidden_layers, STAGES), place.at.pp))
    shapes = [place.local_shape(parameter) for parameter in parameters]
    written = sum(place.writes(parameter, turn) for turn, parameter in enumerate(parameters))
    return f"{len(shapes)} parameters, {written} written"


def schedule(layout: Layout) -> str:
    """Order the actions and transfers of the stages."""
    micro_batches = GLOBAL_BATCH // layout.data
    split = pipeline_split(SHAPE.num_hidden_layers, STAGES)
    programs = stage_programs(orders_of("1f1b", STAGES, micro_batches, 1), split)
    return f"{micro_batches} micro batches, {len(programs[3])} actions and transfers of a stage"


def sampler(layout: Layout, folder: Path) -> str:
    """Read one rank's batch at the start, and that after 10^9 samples."""
    share = BatchShare(16, 1, GLOBAL_BATCH // layout.data, layout.data - 1, layout.data)
    loader = StepLoader(TokenFile.open(folder / "tokens"), share, SampleOrder(0))
    for consumed in (0, CONSUMED):
        rows = len(loader.step_batch(consumed).input_ids)
    return f"{rows} rows"


def hosts(layout: Layout, folder: Path) -> str:
    """Read the hostfile, place the ranks, make the commands, look for tensor groups across hosts."""
    count = layout.world_size // CARDS
    file = folder / f"hosts-{count}"
    file.write_text("".join(f"node-{host} slots={CARDS}\n" for host in range(count)))
    placed, _ = place_ranks(Hosts("hostfile", str(file), read_hostfile(file)), layout.world_size)
    job = Job("hostfile", placed, ("train", "run.toml"), folder, "python", {}, 29500, folder)
    start = ssh(job, Programs())
    warning = placement_warning(layout, [host.name for host in placed for _ in host.ranks])
    return f"{len(start.commands)} commands{warning and ', a warning'}"


def planned(layout: Layout, folder: Path) -> str:
    """Plan every layout of the model on so many cards."""
    settings = {**MODEL, "training.global_batch_size": GLOBAL_BATCH, "training.precision": "bf16"}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    config = load_run(None, [*flags, "--data.source", str(folder), "--run.folder", str(folder)]).config
    cluster = Cluster(
        "H100 80GB HBM3", layout.world_size // CARDS, CARDS, efficiency=0.5, link_efficiency=0.8
    )
    found = search(config, SHAPE.vocab_size, cluster)
    return f"{len(found.fitting) + len(found.too_large)} legal, {len(found.refused)} refused"


def rank_tables(layout: Layout) -> Iterator[str]:
    """Yield what each rank tells of its file: weights in turns, states as equal flat ranges of what a replica holds."""
    split = pipeline_split(SHAPE.num_hidden_layers, STAGES)
    for stage in range(STAGES):
        parameters = list(stage_parameters(SHAPE, split, stage))
        of_rank: list[list[ShardRow]] = [[] for _ in range(layout.data * TENSOR)]
        for tensor in range(TENSOR):
            place = RankPlace(layout, layout.world_size // STAGES * stage + tensor)
            sizes = [np.prod(place.local_shape(parameter), dtype=int) for parameter in parameters]
            ends = np.cumsum(sizes).tolist()
            regions_of = [
                [
                    region
                    for region in place.slices(parameter)
                    if place.is_first_holder(parameter, region[0]) and place.is_first_stage(parameter)
                ]
                for parameter in parameters
            ]
            for data, held in enumerate(balanced_split(ends[-1], layout.data)):
                rows = of_rank[data * TENSOR + tensor]
                for turn, (regions, end, size) in enumerate(zip(regions_of, ends, sizes, strict=True)):
                    whole = range(end - int(size), end)
                    if turn % layout.data == data:
                        rows += _rows(regions, whole, whole, ("weight",))
                    rows += _rows(regions, whole, held, STATES)
        for number, rows in enumerate(of_rank):
            file = f"rank-{stage * len(of_rank) + number:05d}.safetensors"
            yield file_table(file, 10**12 if rows else None, rows)


def _rows(regions: Sequence[Any], whole: range, held: range, keys: Sequence[str]) -> list[ShardRow]:
    low, high = max(whole.start, held.start), min(whole.stop, held.stop)
    if low >= high:
        return []
    rows = []
    for piece in split_flat_range(regions, low - whole.start, high - low):
        all_of_it = piece.numel == piece.region.numel
        for key in keys:
            name = f"{key}/{piece.part.name}" + ("" if all_of_it else f"@{piece.start}")
            rows.append(
                ShardRow(
                    key,
                    piece.part.name,
                    piece.part.shape,
                    "float32",
                    name,
                    piece.region.offsets,
                    piece.region.shape,
                    None if all_of_it else (piece.start, piece.stop),
                    f"{random.getrandbits(256):064x}",
                )
            )
    return rows


def draft(layout: Layout, folder: Path) -> Draft:
    split = pipeline_split(SHAPE.num_hidden_layers, STAGES)
    layers = tuple(split.layers_of(stage) for stage in range(STAGES))
    counters = {"step": 1, "samples": 1, "tokens": 1}
    manifest = Manifest("0", "0", counters, layout, layers, SHAPE, {}, {"step": 1}, {}, {})
    return Draft(folder / partial_name(1, "00"), folder / published_name(1), 0, {}, manifest)


def published(layout: Layout, folder: Path) -> str:
    """Merge, check and publish the tables of all ranks, as rank 0 does; their making is not counted."""
    making = draft(layout, folder)
    making.partial.mkdir(parents=True)
    tables = list(rank_tables(layout))
    for number, table in enumerate(tables):
        if json.loads(table)[1] is not None:
            with (making.partial / f"rank-{number:05d}.safetensors").open("wb") as file:
                file.truncate(10**12)
    mark("tables")
    making.publish(tables)
    size = (folder / published_name(1) / MANIFEST).stat().st_size
    return f"{sum(map(len, tables)) / 1e6:.1f} MB gathered, manifest {size / 1e6:.1f} MB"


def opened(layout: Layout, folder: Path) -> str:
    """Open the checkpoint, as each rank does that loads it."""
    with CheckpointReader(folder / published_name(1)) as reader:
        shards = sum(
            len(entry.shards) for table in reader.manifest.tensors.values() for entry in table.values()
        )
    return f"{len(reader.manifest.files)} files, {shards} shards"


_began = 0.0
_before = 0.0


def mark(_: str) -> None:
    """Begin to count seconds and memory."""
    global _began, _before
    gc.collect()
    _before, _began = _resident(), _processor_seconds()


def _processor_seconds() -> float:
    """Return the seconds of this process and of those that it has waited for: the planner has one a core."""
    return sum(os.times()[:4])


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measured(step: Callable[[], str]) -> Figures:
    """Run a step in a forked process; megabytes: the highest resident memory beyond that at the start."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def run() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
        mark("start")
        note = step()
        seconds = _processor_seconds() - _began
        answers.put(
            Figures(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 * 1.024 - _before, note)
        )

    process = context.Process(target=run)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"a step ended with {process.exitcode}")
    figures: Figures = answers.get()
    return figures


class Crowd:
    """Ranks without processes of their own: sockets of this process that say what members say."""

    def __init__(self, ranks: range, world_size: int, address: tuple[str, int]):
        self._selector, self._sockets = selectors.DefaultSelector(), list[socket.socket]()
        for rank in ranks:
            connection = socket.create_connection(address)
            hello = encode(
                "hello", job="", nonce="", rank=rank, world_size=world_size, host=f"n{rank // 8}", pid=rank
            )
            connection.sendall(hello)
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, LineReader())
            self._sockets.append(connection)

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message from every rank."""
        line = encode(kind, **fields)
        for connection in self._sockets:
            connection.setblocking(True)
            connection.sendall(line)
            connection.setblocking(False)

    def leave(self) -> None:
        """Close the connections."""
        for connection in self._sockets:
            connection.close()

    def hear(self, kind: str) -> None:
        """Wait until every rank has received a message."""
        left = len(self._sockets)
        while left:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                messages = key.data.feed(key.fileobj.recv(2**16))
                left -= any(message["kind"] == kind for message in messages)


def crowd(ranks: range, world_size: int, address: tuple[str, int], news: Any, go: Any) -> None:
    """Play some of the ranks, and tell the time of each event."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    people = Crowd(ranks, world_size, address)
    people.hear("joined")
    news.put(time.monotonic())
    go.wait()
    facts = json.dumps({f"section.setting_{number}": str(number) for number in range(300)})
    people.say("facts", name="start", about="", facts=facts)
    people.hear("value")
    news.put(time.monotonic())
    people.say("alive", step=1, activity="forward")
    people.hear("verdict")
    news.put(time.monotonic())


def coordinator(ranks: int) -> dict[str, Any]:
    """Serve so many connections; return seconds, the coordinator's own, and its bytes a rank."""
    context = multiprocessing.get_context("fork")
    news, go = context.SimpleQueue(), context.Event()
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    serving = Coordinator(listener, CoordinatedJob(ranks, layout=Layout(data=ranks)), say=print)
    halves = (range(ranks // 2), range(ranks // 2, ranks))
    people = [context.Process(target=crowd, args=(half, ranks, serving.address, news, go)) for half in halves]
    for each in people:
        each.start()
    cpu, resident, began = time.process_time(), _resident(), time.monotonic()
    serving.start()
    joined = max(news.get() for _ in halves) - began
    go.set()
    agreed = max(news.get() for _ in halves) - began - joined
    cpu = time.process_time() - cpu
    while not all(state.step for state in list(serving.ranks.values())):
        time.sleep(0.1)
    resident, ending = _resident() - resident, time.monotonic()
    serving.end(Verdict("over", 1))
    told = max(news.get() for _ in halves) - ending
    for each in people:
        each.join()
    serving.join(30)
    return {
        "join": round(joined, 2),
        "agree": round(agreed, 2),
        "verdict": round(told, 2),
        "cpu": round(cpu, 2),
        "megabytes": round(resident, 1),
    }


def tokens(folder: Path) -> None:
    """Write a token file of a million tokens."""
    with (folder / "tokens.bin").open("wb") as bin_file, (folder / "tokens.idx").open("wb") as idx_file:
        writer = TokenWriter(bin_file, idx_file, np.dtype(np.uint16))
        writer.add(np.arange(10**6, dtype=np.uint16) % 256)
        writer.end_document()
        writer.finish()


def steps(layout: Layout, folder: Path) -> dict[str, Callable[[], str]]:
    """Return the steps of one rank by name, in the order of a run."""
    return {
        "hosts": lambda: hosts(layout, folder),
        "places": lambda: places(layout),
        "groups": lambda: mesh(layout),
        "share": lambda: share(layout),
        "sampler": lambda: sampler(layout, folder),
        "schedule": lambda: schedule(layout),
        "published": lambda: published(layout, folder / str(layout.data)),
        "opened": lambda: opened(layout, folder / str(layout.data)),
        "planned": lambda: planned(layout, folder),
    }


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--sockets", type=int, default=16384, help="ranks that meet at a coordinator")
    parser.add_argument("--only", default="", help="the steps that are run, by commas")
    options: argparse.Namespace = report.arguments_of(parser)
    facts, rows = report.machine(), []
    sizes = DATA[:1] if options.quick else DATA
    chosen = options.only.split(",") if options.only else None
    with tempfile.TemporaryDirectory() as name:
        tokens(Path(name))
        for data in sizes:
            layout = layout_of(data)
            for step, run in steps(layout, Path(name)).items():
                if chosen is None or step in chosen:
                    figures = measured(run)
                    row = {"ranks": layout.world_size, "step": step, "seconds": round(figures.seconds, 3)}
                    rows.append({**row, "megabytes": round(figures.megabytes, 1), "note": figures.note})
                    print(rows[-1], flush=True)
    columns = {"ranks": "ranks", "step": "step", "seconds": "s", "megabytes": "MB", "note": ""}
    report.show("control path of one rank", rows, columns)
    meeting = {}
    if chosen is None or "coordinator" in chosen:
        ranks = 512 if options.quick else options.sockets
        meeting = {"sockets": ranks, **coordinator(ranks)}
        print(meeting)
    report.write("control-path", facts, {"coordinator": meeting}, rows, options.results)


if __name__ == "__main__":
    main()
