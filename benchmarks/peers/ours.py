"""megalite, as `megalite train` sets a process up and with the operators that model.kernels = "auto" takes."""

from dataclasses import replace
from pathlib import Path

from benchmarks.peers.contender import PeerLayout, Start, Trained


def build(layout: PeerLayout, start: Start) -> Trained:
    from megalite.launcher.rank.environment import prepare_process

    prepare_process(start.threads, local_ranks=layout.ranks)
    return _build(layout, start)


def _build(layout: PeerLayout, start: Start) -> Trained:
    import os

    import torch

    from benchmarks.workload import SHAPE, Setup, Training
    from megalite.checkpoint.load import load_checkpoint
    from megalite.checkpoint.save import RunRecord, draft_checkpoint, write_draft
    from megalite.model.options import ModelOptions
    from megalite.parallel.mesh import ParallelMesh, connect
    from megalite.selftest.decide import choose_kernels
    from megalite.topology.axes import Layout

    torch.set_num_threads(start.threads)
    if layout.ranks > 1:
        connect(int(os.environ["RANK"]), layout.ranks, device=torch.device("cpu"))
    contender = start.contender
    axes = Layout(layout.pipeline, layout.data, layout.tensor, layout.context)
    setup = Setup(
        axes,
        schedule=contender.schedule,
        balanced=contender.balanced,
        micro_batches=layout.micro_batches,
        options=ModelOptions(operators=choose_kernels("auto", "cpu").operators),
        zero={"stage": layout.zero} if layout.zero else None,
        sequences=layout.sequences,
        shape=replace(SHAPE, max_position_embeddings=layout.length),
        context_method=contender.context_method,
    )
    mesh = setup.mesh() if layout.ranks > 1 else ParallelMesh.single()
    training = Training(setup, mesh)

    def save(folder: Path) -> None:
        record = RunRecord({"step": 1, "samples": 0, "tokens": 0}, {})
        draft = draft_checkpoint(folder, training.replica, training.optimizer.state, record)
        write_draft(draft, mesh)

    def load(folder: Path) -> None:
        [checkpoint] = folder.glob("step-*")
        load_checkpoint(checkpoint, training.replica, training.optimizer.state)

    return Trained(training.step, save, load)
