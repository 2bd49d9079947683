"""One rank of a recorded training: it trains as `megalite train` does, and writes down every tensor of each step.

The wiring is production's: loaders, `TrainStep`, and what it is made of. Nothing here computes what is compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.sections.schema import RunConfig
from megalite.data.batches.loader import StepLoader
from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megalite.launcher.rank.detect import RankInfo
from megalite.model.replica import Replica
from megalite.model.stages import fill
from megalite.ops.choice import SLOTS
from megalite.parallel.device import local_device
from megalite.parallel.gradient_buckets import kept_before_sums
from megalite.parallel.mesh import ParallelMesh, connect, disconnect
from megalite.selftest.decide import agreed_kernels
from megalite.topology.parameters import Parameter
from megalite.train.checkpoints.reference_table import ReferenceFile, give_reference_losses
from megalite.train.inputs import RunInputs
from megalite.train.loaders import loader_maker, training_loader
from megalite.train.optimizer.flat_range import partition_of
from megalite.train.report import device_name
from megalite.train.step.options import context_method
from megalite.train.step.precision import DTYPES, set_tf32
from megalite.train.step.self_check import compare_copies
from megalite.train.step.train_step import StartingPoint, TrainStep
from megalite.verify.document_probe import probe_run
from megalite.verify.findings import INITIAL, OWN, STATE, SUMMED, UPDATED
from megalite.verify.outputs import recorded_outputs
from megalite.verify.scratch import scratch_explained

# The values of an adapter's weights that start at zero, with which half of its gradients would be zero too.
_ADAPTER_STD = 0.05


@dataclass(frozen=True)
class RecordedPiece:
    """A flat range of one registered parameter on a rank, or of something of its shape.

    parts: of the canonical tensors that the parameter consists of, in order: name, offsets and shape of the rank's
    region, and whether this rank's gradient of it counts, where ranks share a head. start: in the flattened shard.
    copies: the ranks with the same shard, whose gradients are summed.
    """

    quantity: str
    name: str
    parts: tuple[tuple[str, tuple[int, ...], tuple[int, ...], bool], ...]
    start: int
    values: Tensor
    copies: tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """One rank's step; of step 0 the initial weights alone. outputs: module -> sample -> sums over its output's values.

    row_ranks: the ranks that share each sequence, whose sums add up.
    """

    pieces: list[RecordedPiece]
    loss: float = 0.0
    norm: float = 0.0
    learning_rate: float = 0.0
    skipped: bool = False
    outputs: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    row_ranks: tuple[int, ...] = ()

    def write(self, path: Path) -> None:
        write_record({**vars(self), "pieces": [vars(each) for each in self.pieces]}, path)

    @classmethod
    def read(cls, path: Path) -> "StepRecord":
        values: dict[str, Any] = torch.load(path, weights_only=True)
        return cls(**{**values, "pieces": [RecordedPiece(**each) for each in values["pieces"]]})


@dataclass(frozen=True)
class EndRecord:
    """The findings of a rank beside its steps. copies: a difference between ranks' copies. leaks: between documents."""

    kernels: str
    operators: dict[str, str]
    device: str
    copies: str = ""
    documents: int = 0
    leaks: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordJob:
    """The training of one job. folder: gets their records. inputs: tokens and initial weights of the run."""

    config: RunConfig
    inputs: RunInputs
    folder: Path
    steps: int
    threads: int

    def step_file(self, rank: int, step: int) -> Path:
        return self.folder / f"rank-{rank}-step-{step}.pt"

    def end_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}-end.pt"


def record_rank(info: RankInfo, job: RecordJob) -> int:
    """Train this rank's steps and write their records; return the exit code."""
    torch.set_num_threads(job.threads)
    config = job.config
    device = local_device(info.local_rank, info.local_world_size)
    connect(info.rank, info.world_size, device=device, rendezvous=info.rendezvous)
    mesh = ParallelMesh.over_world(
        config.layout,
        device,
        sequence_parallel=config.parallel.sequence,
        context_method=context_method(config),
    )
    with scratch_explained():
        Recorder(job, mesh).run()
    disconnect()
    return 0


class Recorder:
    """A rank's TrainStep, and what is written down of its steps."""

    def __init__(self, job: RecordJob, mesh: ParallelMesh):
        self.job, self.mesh, self.config = job, mesh, job.config
        # The gradients that each backward brings, which ZeRO 2 and 3 then take away.
        self._brought: dict[str, Tensor] = {}
        tokenizer = _tokenizer(job)
        shape = self.config.shape(0 if tokenizer is None else tokenizer.vocab_size)
        kernels, _ = agreed_kernels(
            self.config, shape, DTYPES[self.config.training.precision], mesh, leads_node=mesh.rank == 0
        )
        set_tf32(mesh.device, self.config.training.tf32)
        load = loader_maker(self.config, mesh, tokenizer)
        loader = training_loader(self.config, job.inputs.data, load, mesh, tokenizer)
        weights = None if job.inputs.weights is None else Path(job.inputs.weights).expanduser()
        start = StartingPoint(weights, prepare=self._prepare)
        self.trainer = TrainStep(self.config, mesh, shape, loader, start=start, kernels=kernels)
        self._end_id = None if tokenizer is None else tokenizer.end_of_document_id
        if self.trainer.needs_reference_losses:
            assert isinstance(loader, StepLoader)
            file = ReferenceFile(job.folder / "reference.json")
            give_reference_losses(self.trainer, [loader], load, file, lambda: None)

    def run(self) -> None:
        """Train and write the records. Collective."""
        trainer, rank = self.trainer, self.mesh.rank
        StepRecord([*self._weights(INITIAL)]).write(self.job.step_file(rank, 0))
        with trainer.batches:
            for step in range(1, min(self.job.steps, trainer.total_steps) + 1):
                self._step().write(self.job.step_file(rank, step))
            difference = compare_copies(trainer)
            found = probe_run(trainer, self._end_id) if self._end_id is not None else None
        operators = {name: trainer.kernels.operators.of(name) for name in SLOTS}
        end = EndRecord(
            str(trainer.kernels),
            operators,
            device_name(self.mesh.device),
            "" if difference is None else f"{difference.name} on ranks {sorted(difference.ranks)}",
            0 if found is None else found.documents,
            () if found is None else found.leaks,
        )
        write_record(asdict(end), self.job.end_file(rank))

    def _prepare(self, replica: Replica) -> None:
        if self.config.zero_stage:
            # Registered before DeepSpeed's own hooks.
            watch_gradients(replica.trained_tensors, self._brought)
        if self.config.adapter.path is None:
            start_adapter(replica, self.config.run.seed)

    def _step(self) -> StepRecord:
        trainer, mesh = self.trainer, self.mesh
        scale, pieces = trainer.optimizer.loss_scale, list[RecordedPiece]()
        self._brought.clear()
        with kept_before_sums() as kept, recorded_outputs(trainer.stage) as outputs:

            def note_gradients() -> None:
                summed = [*trainer.optimizer.gradients()]
                whole = {each.name: values for each, start, values in summed if start == 0}
                for parameter, start, values in summed:
                    pieces.append(self._piece(SUMMED, parameter, start, values.double() / scale))
                tensors = trainer.replica.trained_tensors
                for parameter in trainer.replica.trained:
                    own = (
                        kept.get(id(tensors[parameter.name])) if summed else self._brought.get(parameter.name)
                    )
                    if own is None and mesh.copies(parameter).size == 1:
                        own = whole.get(parameter.name)
                    if own is not None:
                        pieces.append(self._piece(OWN, parameter, 0, own.double() / scale))

            report = trainer.train_step(before_update=note_gradients)
        pieces += self._weights(UPDATED)
        for shard in trainer.optimizer.state.shards():
            pieces.append(self._piece(STATE + shard.key, shard.parameter, shard.start, shard.values))
        axes = ("cp", "tp") if mesh.splits_sequence else ("cp",)
        row_ranks = mesh.layout.peers(mesh.rank, *axes)
        # The largest of any group of parameters.
        ratios = [group.learning_rate_ratio for group in self.config.optimizer.groups]
        rate = report.learning_rate * max(1.0, *ratios, 0.0)
        skipped = report.overflow is not None
        return StepRecord(pieces, report.loss, report.grad_norm, rate, skipped, dict(outputs), row_ranks)

    def _weights(self, quantity: str) -> Iterator[RecordedPiece]:
        tensors = self.trainer.replica.tensors
        flat = [*(self.trainer.optimizer.state.weights() or ())]
        ranges = {shard.parameter.name for shard in flat}
        for shard in flat:
            yield self._piece(quantity, shard.parameter, shard.start, shard.values)
        for parameter in self.trainer.replica.parameters:
            if parameter.name not in ranges:
                yield from self._weight(quantity, parameter, tensors[parameter.name])

    def _weight(self, quantity: str, parameter: Parameter, tensor: Any) -> Iterator[RecordedPiece]:
        """Yield a weight that the optimizer does not hold, or the part that ZeRO 3 has left of it here."""
        if tensor.numel():
            yield self._piece(quantity, parameter, 0, tensor)
        elif hasattr(tensor, "ds_tensor") and not parameter.trained:
            partition = partition_of(tensor)
            start = self.mesh.copies(parameter).rank * len(partition)
            if start < tensor.ds_numel:
                values = partition[: tensor.ds_numel - start]
                yield self._piece(quantity, parameter, start, values)

    def _piece(self, quantity: str, parameter: Parameter, start: int, values: Tensor) -> RecordedPiece:
        mesh = self.mesh
        parts = tuple(
            (part.name, region.offsets, region.shape, mesh.is_first_holder(parameter, part))
            for part, region in mesh.slices(parameter)
        )
        flat = values.detach().reshape(-1).cpu().clone()
        return RecordedPiece(quantity, parameter.name, parts, start, flat, mesh.copies(parameter).ranks)


def write_record(values: Mapping[str, Any], path: Path) -> None:
    """Write what `torch.load` reads. Raises the OSError of a full disk, where torch has a RuntimeError without it."""
    try:
        with path.open("wb") as file:
            torch.save(values, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@torch.no_grad()
def start_adapter(replica: Replica, seed: int) -> None:
    """Give the adapter's weights that start at zero other values: with zeros half of its gradients are zero too."""
    begun = [
        replace(each, std=_ADAPTER_STD) for each in replica.parameters if each.adapter and each.fill == 0
    ]
    fill(begun, replica, seed)


def watch_gradients(tensors: Mapping[str, nn.Parameter], sums: dict[str, Tensor]) -> None:
    """Add each backward's gradients to `sums` in float64, before ZeRO 2 and 3 remove them."""

    def add(name: str, tensor: Tensor) -> None:
        if tensor.grad is not None:
            sums[name] = sums.get(name, 0) + tensor.grad.double()

    for name, tensor in tensors.items():
        tensor.register_post_accumulate_grad_hook(partial(add, name))


def _tokenizer(job: RecordJob) -> Tokenizer | None:
    folder = job.inputs.data.tokenizer
    if folder is None:
        return None
    return load_tokenizer(folder, end_of_document=job.config.tokenizer.end_of_document)
