"""From recordings to a certificate: the bounds, the comparison, and what it leaves open."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median

import torch

from megalite.config.sections.schema import RunConfig
from megalite.topology.adapter import Lora
from megalite.train.step.precision import DTYPES
from megalite.verify.certificate import Certificate, config_sha256, worst_of
from megalite.verify.compare import Comparer
from megalite.verify.findings import INITIAL, ORDER, STATE, SUMMED, LayoutComparison
from megalite.verify.measure import NARROW_FLOOR, layout_bound, narrow_bound
from megalite.verify.record import EndRecord, RecordJob, StepRecord

# Ranks and fused operators round at other places than the one process does: 2.6 times its error was the most, in 400
# layouts of eleven models in bf16 and fp16.
_OTHER_ROUNDING = 1.5


@dataclass(frozen=True)
class Recordings:
    """The recorded trainings. exact: one process in float64, for a run in bf16 or fp16."""

    layout: RecordJob
    one: RecordJob
    exact: RecordJob | None

    @property
    def steps(self) -> int:
        """The steps that were recorded: a run may have fewer than were asked for."""
        return max(step for step in range(self.layout.steps + 1) if self.one.step_file(0, step).exists())


def judged(config: RunConfig, recordings: Recordings, changes: Sequence[str], full_size: bool) -> Certificate:
    """Compare the recordings of a run and certify the result. config: the run as its user wrote it."""
    torch.set_num_threads(recordings.layout.threads)
    trained, layout = recordings.layout.config, config.layout
    comparison, bounds = _compared(recordings)
    ends = [
        EndRecord(**torch.load(recordings.layout.end_file(rank), weights_only=True))
        for rank in range(layout.world_size)
    ]
    return Certificate(
        config_sha256=config_sha256(config),
        layout=layout.text,
        axes=layout.sizes,
        ranks=[layout.describe(rank) for rank in range(layout.world_size)],
        steps=recordings.steps,
        precision=trained.training.precision,
        full_size=full_size,
        bounds={key: bounds[key] for key in ORDER},
        worst=worst_of(comparison),
        departures=comparison.departures,
        copies=ends[0].copies,
        documents=sum(each.documents for each in ends),
        leaks=list(dict.fromkeys(leak for each in ends for leak in each.leaks)),
        changed=changes,
        unchecked=list(_unchecked(config, recordings, comparison, ends[0], full_size=full_size)),
        operators=ends[0].operators,
        kernels=ends[0].kernels,
        device=ends[0].device,
    )


def _compared(recordings: Recordings) -> tuple[LayoutComparison, dict[str, float]]:
    config, steps = recordings.layout.config, recordings.steps
    precision = config.training.precision
    dtype = DTYPES[precision]
    one = partial(_read, recordings.one, 0)
    if recordings.exact is None:
        bounds = dict.fromkeys(ORDER, layout_bound(precision, config.zero_stage))
        if not (isinstance(config.shape(1).adapter, Lora) and config.adapter.dora):
            # DoRA's magnitudes are sums over tensor-parallel ranks; all else is drawn or read.
            bounds[INITIAL] = 0.0
    else:
        exact = partial(_read, recordings.exact, 0)
        unbound = dict.fromkeys(ORDER, inf)
        own = Comparer(lambda rank, step: one(step), exact, 1, unbound, dtype).compare(steps)
        bounds, one = _measured_bounds(precision, own), exact
    # Others are linear in the gradient, or have their epsilon raised (shrink.py).
    signs = config.optimizer.name in ("lion", "adafactor")
    read, ranks = partial(_read, recordings.layout), config.layout.world_size
    comparer = Comparer(read, one, ranks, bounds, dtype, signs=signs)
    return comparer.compare(steps), bounds


def _measured_bounds(precision: str, own: LayoutComparison) -> dict[str, float]:
    """Return the bounds of a run in bf16 or fp16, from the errors of one process in the same type.

    A tensor whose own error is by chance small has the bound of the quantity's median; one whose terms cancel has its
    own, which then loosens no other.
    """
    bounds = dict.fromkeys(ORDER, NARROW_FLOOR[precision])
    for quantity, errors in own.errors.items():
        usual, key = median(errors.values()), STATE if quantity.startswith(STATE) else quantity
        for name, error in errors.items():
            if quantity != INITIAL:
                bound = narrow_bound(precision, _OTHER_ROUNDING * max(error, usual))
                bounds[f"{quantity} of {name}"], bounds[key] = bound, max(bounds[key], bound)
    return bounds


def _read(job: RecordJob, rank: int, step: int) -> StepRecord:
    return StepRecord.read(job.step_file(rank, step))


def _unchecked(
    config: RunConfig,
    recordings: Recordings,
    comparison: LayoutComparison,
    end: EndRecord,
    *,
    full_size: bool,
) -> Iterator[str]:
    """Yield what the certificate says nothing about."""
    trained = recordings.layout.config
    if not full_size:
        yield "the run's own sizes (--full-size)"
    yield "the run's own text: its steps had drawn text, prepared and read as data.kind says"
    if config.data.order == "megatron":
        yield 'data.order = "megatron": the drawn text came in megalite\'s order'
    yield f"steps after step {recordings.steps}; validation, saving, resuming and export"
    if trained.training.precision == "fp64" != config.training.precision:
        yield f'rounding in training.precision = "{config.training.precision}" (--precision run)'
    if trained.training.precision == "fp32" != config.training.precision:
        yield "float64, which ZeRO 3 and deepspeed.native_optimizer do not know"
    yield (
        "other devices than this one's"
        if end.device != "cpu"
        else "an accelerator, and NCCL: this ran on a CPU over gloo"
    )
    yield "several hosts: all ranks ran on this one"
    if config.zero_stage and SUMMED not in comparison.worst:
        yield "gradients behind their sum over data-parallel ranks, which ZeRO has apart: moments and weights show it"
    if config.zero_stage == 3:
        yield "the copies on several ranks: ZeRO 3 has none"
    elif config.zero_stage:
        yield "the copies of optimizer state on several ranks: ZeRO has none"
    if config.data.document_mask and config.layout.context > 1:
        yield "the probe of documents with context-parallel ranks, beyond their equality to one process"
    if recordings.exact is not None and config.model.num_experts:
        yield "the choice of experts, and what balances it: all tokens went to all experts (--precision float64)"
    if comparison.skipped_steps:
        yield f"the update of {comparison.skipped_steps} steps, whose gradient is not finite"
