"""Train in layout A, save, load in layout B, train on, and compare, for every ordered pair of layouts.

Each layout is trained once without interruption and saved half-way and at the end; a pair costs one load and the second
half. All by the trainer of `megalite train`, so parameter groups, schedule and data position are tested too.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megalite.checkpoint.folder import published_name, read_manifest
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice
from megalite.checkpoint.save import write_draft
from megalite.data.batches.loader import StepLoader
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.state import EMA, MASTER, WEIGHT
from megalite.train.step.train_step import TrainStep
from tests.support.matrix.axes import BASE, ZERO, Settings
from tests.support.matrix.rows import config_of
from tests.support.matrix.train import TinyLoader
from tests.support.parity import FLOAT32_RTOL, NARROW_FLOOR, ZERO_RTOL, relative_error, tensor_errors
from tests.support.ranks import RankPool
from tests.support.training import fp16_allowed

HALF, WHOLE = 4, 8
PAIR_SECONDS = 120

COMMON: Settings = {
    **BASE,
    "training.precision": "fp32",
    "training.steps": WHOLE,
    "model.vocab_size": 101,
    "model.num_hidden_layers": 4,
    "model.num_key_value_heads": 4,
    "model.tie_word_embeddings": True,
    "model.residual_dropout": 0.1,
    "model.kernels": "reference",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 2e-3,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 3,
    "optimizer.gradient_clipping": 0.5,
    "optimizer.ema_decay": 0.8,
    "optimizer.groups": [
        {"pattern": "*.mlp.*", "learning_rate_ratio": 0.5},
        {"pattern": "*.self_attn.*", "weight_decay": 0.3},
        {"pattern": "*.input_layernorm.*", "learning_rate_ratio": 0.0},
    ],
}
SEQUENCES = 8


def _layout(tensor: int = 1, pipeline: int = 1, data: int = 1, zero: int = 0, **changes: object) -> Settings:
    """Return the settings of a layout with these axis sizes; the global batch is the same. changes: section__key."""
    stage = {f"{ZERO}.stage": zero} if zero else {}
    micro_batches = 4 if pipeline > data else 1 if zero == 3 else 2
    # By default ZeRO 3 would not partition such small weights; this threshold excludes only the norms. It has no EMA.
    third = {f"{ZERO}.stage3_param_persistence_threshold": 100, "optimizer.ema_decay": 0.0}
    return {
        "parallel.tensor": tensor,
        "parallel.pipeline": pipeline,
        "parallel.data": data,
        "training.micro_batches": micro_batches,
        "training.micro_batch_size": SEQUENCES // data // micro_batches,
        **stage,
        **(third if zero == 3 else {}),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


_OPTIMIZER = {f"{ZERO}.offload_optimizer.device": "cpu"}
_INTERLEAVED = {"parallel__schedule": "interleaved_1f1b", "parallel__virtual_stages": 2}
_V_SHAPED = {"parallel__schedule": "zbv", "parallel__virtual_stages": 2}

LAYOUTS: Mapping[str, Settings] = {
    "one process": _layout(),
    "tp2": _layout(tensor=2, parallel__sequence=True),
    "tp4": _layout(tensor=4),
    "dp2": _layout(data=2),
    "dp2 zero1": _layout(data=2, zero=1),
    "dp2 zero2": _layout(data=2, zero=2),
    "dp2 zero3": _layout(data=2, zero=3),
    "dp2 zero2 offload": {**_layout(data=2, zero=2), **_OPTIMIZER},
    "dp2 zero3 offload": {
        **_layout(data=2, zero=3),
        **_OPTIMIZER,
        f"{ZERO}.offload_param.device": "cpu",
    },
    "tp2 dp2 zero3": _layout(tensor=2, data=2, zero=3),
    "pp2 uneven": _layout(pipeline=2, parallel__layers_per_stage=[3, 1]),
    "pp2 virtual": _layout(pipeline=2, **_INTERLEAVED),
    "tp2 pp2 v-shaped": _layout(tensor=2, pipeline=2, **_V_SHAPED),
    "pp4": _layout(pipeline=4),
    "pp2 dp2 zero1 offload": {**_layout(pipeline=2, data=2, zero=1), **_OPTIMIZER},
    "tp2 pp2 dp2 zero1": _layout(tensor=2, pipeline=2, data=2, zero=1),
    "cp2": _layout(parallel__context=2),
    "cp2 dp2 zero2": _layout(data=2, zero=2, parallel__context=2),
}

_FP16 = {
    "training.precision": "fp16",
    "training.initial_loss_scale_power": 9,
    "training.loss_scale_window": 3,
}
# Layouts with precisions. Pairs of them differ by rounding too, which is no fault of the checkpoint.
PRECISIONS: Mapping[str, Settings] = {
    "fp32 one process": LAYOUTS["one process"],
    "fp32 dp2 zero3": LAYOUTS["dp2 zero3"],
    "bf16 tp2": {**LAYOUTS["tp2"], "training.precision": "bf16"},
    "bf16 dp2 zero1": {**LAYOUTS["dp2 zero1"], "training.precision": "bf16"},
    "bf16 dp2 zero3": {**LAYOUTS["dp2 zero3"], "training.precision": "bf16"},
    "fp16 one process": {**LAYOUTS["one process"], **_FP16},
    "fp16 dp2 zero2": {**LAYOUTS["dp2 zero2"], **_FP16},
}

_MIXTURE: Settings = {
    "model.num_experts": 7,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 22,
    "model.shared_intermediate_size": 20,
    "model.first_k_dense_replace": 1,
    "model.router_scores": "sigmoid",
    "model.router_correction_bias": True,
    "training.router_balance": 0.01,
    "training.router_bias_rate": 0.01,
}
_WHOLE = {"parallel__sequence": True, "parallel__expert_tensor": 1}
# Layouts of a mixture, whose experts the ranks do not divide.
EXPERTS: Mapping[str, Settings] = {
    name: {**_MIXTURE, **layout}
    for name, layout in {
        "one process": _layout(),
        "dp2 ep2": _layout(data=2, parallel__expert=2),
        "tp2 cut": _layout(tensor=2),
        "pp2 dp2 ep2": _layout(pipeline=2, data=2, parallel__expert=2),
        "tp2 ep2 whole": _layout(tensor=2, parallel__expert=2, **_WHOLE),
        "cp2 dp2 ep4": _layout(data=2, parallel__context=2, parallel__expert=4),
        "dp2 ep2 zero1": _layout(data=2, zero=1, parallel__expert=2),
        # Their biases have no master, and stay in float32.
        "bf16 one process": _layout(training__precision="bf16"),
        "bf16 dp2 ep2 zero1": _layout(data=2, zero=1, parallel__expert=2, training__precision="bf16"),
    }.items()
}

EVERY_PAIR = [(one, other) for one in LAYOUTS for other in LAYOUTS]
PRECISION_PAIRS = [(one, other) for one in PRECISIONS for other in PRECISIONS]


def pairs_for_every_change() -> list[tuple[str, str]]:
    """Return 27 pairs of up to four ranks: each layout writes for and reads from another one, and most from itself."""
    names = [name for name, settings in LAYOUTS.items() if world_size(settings) <= 4]
    across = [(name, names[(place + 5) % len(names)]) for place, name in enumerate(names)]
    return across + [(name, name) for name in ("dp2 zero2", *names[::2]) if name != "tp4"] + [("tp2", "tp2")]


def world_size(settings: Settings) -> int:
    return config_of({**COMMON, **settings}).layout.world_size


@dataclass(frozen=True)
class Steps:
    """The reported values of each step of a run."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    scales: list[float]


def train(settings: Settings, folder: str, resume: str | None, saved: Sequence[int]) -> Steps:
    """Train on this rank up to step WHOLE, and save a checkpoint at each of the steps `saved`."""
    with fp16_allowed() if "zero_optimization" in repr(settings) else nullcontext():
        config = config_of({**COMMON, **settings})
        mesh = ParallelMesh.over_world(config.layout, sequence_parallel=config.parallel.sequence)
        assert config.model.vocab_size != "auto"
        shape = config.model.shape(config.model.vocab_size)
        trainer = TrainStep(config, mesh, shape, cast(StepLoader, TinyLoader(config, mesh, shape)))
        if resume is not None:
            trainer.resume(Path(resume))
        steps = Steps([], [], [], [])
        while True:
            if trainer.state.step in saved:
                save(trainer, Path(folder))
            if trainer.state.step == trainer.total_steps:
                return steps
            report = trainer.train_step()
            steps.losses.append(report.loss)
            steps.norms.append(report.grad_norm)
            steps.rates.append(report.learning_rate)
            steps.scales.append(report.loss_scale)


def save(trainer: TrainStep, folder: Path) -> Path:
    """Save a trainer's state as a checkpoint; return its folder. Collective."""
    draft = trainer.draft(folder)
    write_draft(draft, trainer.mesh)
    return draft.published


@dataclass(frozen=True)
class Outcome:
    """The largest error of a pair for each quantity, and the allowed errors. exact: violated equalities.

    where: the tensor or step with the largest error.
    """

    errors: Mapping[str, float]
    allowed: Mapping[str, float]
    where: Mapping[str, str] = field(default_factory=dict)
    exact: Sequence[str] = ()

    @property
    def problems(self) -> list[str]:
        over = (
            f"{what}: relative error {error:.2e} at {self.where[what]}, allowed {self.allowed[what]:.0e}"
            for what, error in self.errors.items()
            if not error <= self.allowed[what]
        )
        return [*self.exact, *over]


class Pairs:
    """Runs pairs on a pool of ranks; a layout is trained and saved when a pair first needs it."""

    def __init__(self, pool: RankPool, folder: Path, layouts: Mapping[str, Settings] = LAYOUTS):
        self._pool, self._folder, self._layouts = pool, folder, layouts
        self._whole: dict[str, Steps] = {}

    def run(self, writer: str, reader: str) -> Outcome:
        """Train on in `reader` from the half-way checkpoint of `writer`. Raises AssertionError if ranks disagree."""
        whole = self._uninterrupted(writer)
        written = self._folder / writer / published_name(HALF)
        folder = self._folder / "pair"
        shutil.rmtree(folder, ignore_errors=True)
        steps = self._train(reader, folder, written)
        exact = [*_differences(written, folder / published_name(HALF))]
        ended, expected = folder / published_name(WHOLE), self._folder / writer / published_name(WHOLE)
        if whole.rates[HALF:] != steps.rates:
            exact.append(f"the learning rates are {steps.rates}, not {whole.rates[HALF:]}")
        if writer == reader:
            exact += _not_bit_for_bit(whole, steps, expected, ended)
            return Outcome({}, {}, exact=exact)
        errors = {
            "losses": _step_errors(steps.losses, whole.losses[HALF:]),
            **_state_errors(contents(ended), contents(expected)),
        }
        worst = {what: max((error, name) for name, error in each.items()) for what, each in errors.items()}
        return Outcome(
            {what: error for what, (error, _) in worst.items()},
            self._allowed(writer, reader, errors),
            {what: name for what, (_, name) in worst.items()},
            exact,
        )

    def _allowed(self, writer: str, reader: str, errors: Mapping[str, object]) -> dict[str, float]:
        narrow = {self._layouts[name].get("training.precision", "fp32") for name in (writer, reader)} - {
            "fp32"
        }
        if narrow:
            # Other rounding from here on; exact equality is checked right after loading.
            return dict.fromkeys(errors, float("inf")) | {
                "losses": max(NARROW_FLOOR[each] for each in narrow)
            }
        return dict.fromkeys(errors, FLOAT32_RTOL) | {"losses": ZERO_RTOL}

    def _uninterrupted(self, name: str) -> Steps:
        if name not in self._whole:
            self._whole[name] = self._train(name, self._folder / name, None)
        return self._whole[name]

    def _train(self, name: str, folder: Path, resume: Path | None) -> Steps:
        settings = self._layouts[name]
        first, *others = self._pool.run(
            train,
            world_size(settings),
            timeout=PAIR_SECONDS,
            settings=settings,
            folder=str(folder),
            resume=None if resume is None else str(resume),
            saved=(HALF, WHOLE),
        )
        for rank, other in enumerate(others, start=1):
            assert other == first, f"rank {rank} reports {other}, rank 0 {first}"
        return cast(Steps, first)


def contents(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Return state key -> canonical name -> full tensor."""
    with CheckpointReader(checkpoint) as reader:
        return {
            kind: {name: reader.read(kind, name, full_slice(entry.shape)) for name, entry in entries.items()}
            for kind, entries in reader.manifest.tensors.items()
        }


def exact_contents(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Return `contents` with the fp32 master weights in place of the weights of a bf16 or fp16 model."""
    found = contents(checkpoint)
    exact = found[WEIGHT] | found.pop(MASTER, {})
    return {**found, WEIGHT: exact}


def _differences(written: Path, loaded: Path) -> Iterator[str]:
    """Yield the bitwise differences between a checkpoint and the one saved directly after loading it."""
    before, after = read_manifest(written), read_manifest(loaded)
    if before.trainer_state != after.trainer_state:
        yield f"the trainer stands at {after.trainer_state}, not {before.trainer_state}"
    yield from _scalar_differences(before, after)
    expected, found = exact_contents(written), exact_contents(loaded)
    if (expected.keys() ^ found.keys()) - {EMA}:
        yield f"there are {sorted(found)}, not {sorted(expected)}"
    for kind in expected.keys() & found.keys():
        for name, tensor in expected[kind].items():
            if not torch.equal(found[kind][name], tensor):
                yield f"{kind} of {name} is not what was written"


def _scalar_differences(before: Manifest, after: Manifest) -> Iterator[str]:
    for name in before.optimizer.keys() & after.optimizer.keys() | {"step"}:
        if before.optimizer[name] != after.optimizer[name]:
            yield f"{name} is {after.optimizer[name]}, not {before.optimizer[name]}"


def _not_bit_for_bit(whole: Steps, steps: Steps, expected: Path, ended: Path) -> Iterator[str]:
    for what in ("losses", "norms", "scales"):
        if getattr(whole, what)[HALF:] != getattr(steps, what):
            yield f"{what} are {getattr(steps, what)}, not to the bit {getattr(whole, what)[HALF:]}"
    one, other = read_manifest(expected), read_manifest(ended)
    # These include the hash of every shard.
    for what in ("tensors", "optimizer", "trainer_state", "files"):
        if getattr(one, what) != getattr(other, what):
            yield f"{what} at the end are not those of the uninterrupted run"


def _state_errors(
    actual: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, float]]:
    """Return the errors of each tensor, for each state key that both have."""
    return {kind: tensor_errors(actual[kind], expected[kind]) for kind in expected if kind in actual}


def _step_errors(values: Sequence[float], expected: Sequence[float]) -> dict[str, float]:
    return {
        f"step {step}": relative_error(*pair)
        for step, pair in enumerate(zip(values, expected, strict=True), start=HALF + 1)
    }
