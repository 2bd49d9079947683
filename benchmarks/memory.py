"""Memory of a rank in a step of the 17M model: ZeRO stages, recompute, precision; measured and by formula.

    python -m benchmarks.memory [--quick] [--only TEXT]

Two data-parallel ranks, each with two sequences of 256 tokens as one micro batch; the figures are rank 0's, of the
third step. The cases of context parallelism have one sequence of 2048 tokens on c = 1, 2, 4 and 8 ranks, 8 heads of 48
with 2 of keys and values, and the compiled operators; `of ideal`: activations at c = 1 over c times those of the row.
Tensors are counted exactly, by distinct storages:

parameters   of the model, as the rank keeps them between steps.
optimizer    all that the optimizer keeps: Adam's two moments, and the master weights where it has its own.
gradients    at the end of the backward (`.grad`), or after the reduction (the optimizer's partition): the larger.
activations  what was born in the forward and lives when it ends: what the backward will read, and the logits' share.
gathered     the weights that ZeRO 3 has put together in the forward and still holds when it ends.
other        the rest that lives between steps: rotary tables, the batch, an engine's buffers.
peak         of all tensors at once during the step, those of a moment included; and when that was.
built        the peak RSS of the process when all is built, over what it was before: initial weights are drawn in
             float64, a parameter at a time.
RSS          the same after three steps; torch's own buffers and the C library's waste included.

ZeRO's buckets are of 4 M values here, not of DeepSpeed's own 500 M: ZeRO 2 allocates one of them each step. The row
that says so shows it; as a CPU gives no memory before it is written, it is in `peak` and not in RSS.

By formula, with N parameters (16.91 M; tied head counted once), D ranks, e bytes a model value, T tokens of the rank,
H hidden, I intermediate, V vocabulary, a heads, d head size, L layers:

parameters   e N; ZeRO 3: e N / D, and beside it, whole on every rank, the weights of at most 10^5 values
             (`stage3_param_persistence_threshold`).
optimizer    none: 8 N, and 4 N master weights where e < 4.   ZeRO 1-3: 12 N / D (DeepSpeed has its own float32 master
             weights even where the model is float32).
gradients    none, ZeRO 1: 4 N, as a step's micro batches are summed first and reduced once. ZeRO 2, 3: 4 N / D, as
             every backward reduces them; a bucket and the largest gradient come for a moment (`peak`). In float32
             ZeRO 2 keeps the whole gradient of a parameter that the border of its partition cuts, which is not counted.
activations  L layers of e T (8 H + 3 I) + 4 T (a + 2): the inputs of both norms, what they give, q, k, v, attention's
             output, gate and up, their product; and attention's log-sum-exp and the norms' statistics. Selective
             recompute keeps attention's output, as the projection after it reads that, and drops 4 T a. Full keeps
             the input, e T H. Around them: e T (2 H + d) for the last norm, its output, the rotation, and 4 T (V + 1)
             for the logits. With k heads of keys and values for a heads 6 H + 2 k d stands for 8 H. With context
             parallelism T is of the rank, and each layer keeps the `context_kept` of megalite/topology/context.py too.
gathered     ZeRO 3: e N, less what it never partitions, as the backward will use them: a weight is let go of after the
             forward only where more than `stage3_max_reuse_distance` values (10^9) come before it is used again, and
             is fetched ahead of its use within `stage3_prefetch_bucket_size`. With both 0: nothing.
other        ZeRO 3: 4 N / D, as what sums its gradients lives on between steps (with the optimizer offloaded a second
             time, where that is), and a bucket.
"""

import gc
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import report
from benchmarks.ranks import run_ranks
from benchmarks.workload import SHAPE, Setup, Training
from megalite.config.sections.training_section import ComputeSettings
from megalite.model.options import ModelOptions
from megalite.ops import extension
from megalite.ops.choice import ALL_COMPILED, PLAIN_TORCH
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.context import CONTEXT_METHODS, ContextMethod, ContextSizes, context_kept
from megalite.topology.parameters import canonical_tensors

DATA = Layout(data=2)
STEPS = 3
MIB = 2**20
PARTS = ("parameters", "optimizer", "gradients", "activations", "gathered")
PERSISTENT = 10**5  # DeepSpeed's own stage3_param_persistence_threshold


def recomputing(mode: Any, ratio: float | None = None) -> ModelOptions:
    return ModelOptions(training=ComputeSettings(recompute=mode, recompute_ratio=ratio))


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"stage": stage, "reduce_bucket_size": 2**22, "allgather_bucket_size": 2**22, **settings}


LONG = replace(SHAPE, num_attention_heads=8, num_key_value_heads=2, head_dim=48, max_position_embeddings=2048)
ALONE = "one sequence of 2048"


def long_sequence(ranks: int, method: ContextMethod = "gather") -> Setup:
    """One sequence of LONG over context-parallel ranks."""
    options = ModelOptions(operators=ALL_COMPILED if extension.available("cpu") else PLAIN_TORCH)
    return Setup(Layout(context=ranks), sequences=1, shape=LONG, context_method=method, options=options)


CASES: dict[str, Setup] = {
    "torch optimizer": Setup(DATA),
    "ZeRO 1": Setup(DATA, zero=zero(1)),
    "ZeRO 2": Setup(DATA, zero=zero(2)),
    "ZeRO 2, optimizer offloaded": Setup(DATA, zero=zero(2, offload_optimizer={"device": "cpu"})),
    "ZeRO 3": Setup(DATA, zero=zero(3)),
    "ZeRO 3, optimizer offloaded": Setup(DATA, zero=zero(3, offload_optimizer={"device": "cpu"})),
    "ZeRO 3, weights let go of": Setup(
        DATA, zero=zero(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    ),
    "ZeRO 2, DeepSpeed's bucket": Setup(DATA, zero={"stage": 2}),
    "recompute selective": Setup(DATA, options=recomputing("selective")),
    "recompute half of the layers": Setup(DATA, options=recomputing("full", ratio=0.5)),
    "recompute full": Setup(DATA, options=recomputing("full")),
    "bf16": Setup(DATA, options=ModelOptions(dtype=torch.bfloat16)),
    "bf16, ZeRO 2": Setup(DATA, zero=zero(2), options=ModelOptions(dtype=torch.bfloat16)),
    "ZeRO 2, recompute full": Setup(DATA, zero=zero(2), options=recomputing("full")),
    ALONE: long_sequence(1),
    **{
        f"{ALONE}, context {ranks}, {method}": long_sequence(ranks, method)
        for method in CONTEXT_METHODS
        for ranks in (2, 4, 8)
    },
}
QUICK = ("torch optimizer", "ZeRO 2", "ZeRO 3", "recompute full")


@dataclass(frozen=True)
class Held:
    """Bytes of a rank."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    gathered: int
    other: int
    peak: int
    peak_in: str


class Storages:
    """Distinct storages and their bytes."""

    def __init__(self, tensors: Iterable[Any] = ()):
        self.bytes: dict[int, int] = {}
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.bytes[storage._cdata] = storage.nbytes()

    def without(self, *others: "Storages") -> "Storages":
        rest = Storages()
        taken = set().union(*(other.bytes for other in others))
        rest.bytes = {key: size for key, size in self.bytes.items() if key not in taken}
        return rest

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class Born(TorchDispatchMode):
    """The storages that operators have made since this began, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        # A weak reference keeps the address of a storage from being given to another one.
        self._known = {
            tensor.untyped_storage()._cdata: StorageWeakRef(tensor.untyped_storage())
            for tensor in _all_tensors()
            if tensor.device.type == "cpu"
        }
        self.peak, self.peak_in = 0, ""
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        born = self._alive.get(key)
        if key in self._known or (born is not None and not born[0].expired()):
            return
        self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
        total = self.total()
        if total > self.peak:
            self.peak, self.peak_in = total, self.phase

    def total(self) -> int:
        return self.alive().total

    def alive(self) -> Storages:
        self._alive = {key: born for key, born in self._alive.items() if not born[0].expired()}
        alive = Storages()
        alive.bytes = {key: size for key, (_, size) in self._alive.items()}
        return alive


def _all_tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


class Watched(Training):
    """A training that counts what it holds at the end of its forward and of its backward."""

    def __init__(self, setup: Setup, mesh: ParallelMesh):
        super().__init__(setup, mesh)
        self.activations = self.gathered = self.gradients = 0
        self._born: Born | None = None
        # After DeepSpeed's own hooks, which let go of gathered weights.
        self.replica.stage.register_forward_hook(self._count_forward)

    def _count_forward(self, *_: Any) -> None:
        if self._born is not None:
            born = self._born.alive()
            self.activations = born.without(self._parameters()).total
            self.gathered = born.total - self.activations
            self._born.phase = "backward"

    def counted_step(self) -> Held:
        gc.collect()
        with Born() as self._born:
            self.pipeline.forward_backward(self.batch, self._weight)
            self.gradients = self._gradients()
            self._born.phase = "reduction"
            self.optimizer.reduce_gradients()
            self.gradients = max(self.gradients, self._gradients())
            self._born.phase = "update"
            squared_norm = self.replica.mesh.reduce_over_world(self.optimizer.squared_norm())
            self.optimizer.step(3e-4, float(squared_norm))
        transient, peak_in = self._born.peak, self._born.peak_in
        gc.collect()
        everything, parameters = Storages(_all_tensors()), self._parameters()
        optimizer = Storages(self._optimizer_tensors()).without(parameters)
        other = everything.without(parameters, optimizer)
        return Held(
            parameters.total,
            optimizer.total,
            self.gradients,
            self.activations,
            self.gathered,
            other.total,
            everything.total + transient,
            peak_in,
        )

    def _parameters(self) -> Storages:
        # ZeRO 3 keeps its part of a parameter beside it, and the parameter itself empty.
        tensors = list(self.replica.stage.parameters())
        return Storages([*tensors, *(getattr(tensor, "ds_tensor", None) for tensor in tensors)])

    def _gradients(self) -> int:
        tensors = list(self.replica.stage.parameters())
        zero = getattr(self.optimizer, "_zero", None)
        # Gradients over several backwards: ZeRO 2 keeps these under other names than gradients reduced once per step.
        names = ("averaged_gradients", "all_grad_tensors", "accumulated_grads_in_cpu")
        partition = [leaf for name in names for leaf in tree_leaves(dict(getattr(zero, name, {})))]
        # A list of DeepSpeed's own kind is a leaf.
        partition = [getattr(leaf, "flat_partition", leaf) for leaf in partition]
        holders = [*tensors, *self._masters()]
        kept = [getattr(tensor, name, None) for tensor in holders for name in ("grad", "grad_accum")]
        return Storages([*kept, *partition]).total

    def _optimizer_tensors(self) -> list[Any]:
        optimizer = getattr(self.optimizer, "_optimizer", None)
        if optimizer is None:
            optimizer = self.optimizer._zero.optimizer  # type: ignore[attr-defined]
        groups = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        return [*groups, *self._masters(), *tree_leaves(list(optimizer.state.values()))]

    def _masters(self) -> list[Tensor]:
        """ZeRO 3's, which its optimizer's groups have only while they are updated."""
        return list(getattr(getattr(self.optimizer, "_zero", None), "fp32_partitioned_groups_flat", ()))


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def hold(setup: Setup) -> Held:
    """Measure the memory of this rank of the current process group."""
    training = Watched(setup, setup.mesh())
    for _ in range(STEPS - 1):
        training.step()
    return training.counted_step()


def grow(setup: Setup) -> tuple[int, int]:
    """How much this rank's peak RSS has grown when all is built, and after the steps; nothing is counted meanwhile."""
    mesh = setup.mesh()
    before = _peak_rss()
    training = Training(setup, mesh)
    built = _peak_rss() - before
    for _ in range(STEPS):
        training.step()
    return built, _peak_rss() - before


def formula(setup: Setup) -> dict[str, float]:
    """Bytes of each part, as the module's docstring says."""
    sizes = [torch.Size(size).numel() for size in canonical_tensors(setup.shape).values()]
    parameters = sum(sizes)
    ranks, value = setup.layout.data, setup.options.dtype.itemsize
    zero = setup.zero or {"stage": 0}
    stage = zero["stage"]
    kept = value * (sum(size for size in sizes if size <= PERSISTENT) if stage == 3 else parameters)
    master = 4 if stage or value < 4 else 0
    gathers = stage == 3 and zero.get("stage3_max_reuse_distance", 1) > 0
    return {
        "parameters": kept + (value * parameters / ranks if stage == 3 else 0),
        "optimizer": (8 + master) * parameters / (ranks if stage else 1),
        "gradients": 4 * parameters / (ranks if stage >= 2 else 1),
        "activations": _activations(setup),
        "gathered": value * parameters - kept if gathers else 0,
    }


def _activations(setup: Setup) -> float:
    shape, options, layout = setup.shape, setup.options, setup.layout
    value, hidden, heads = options.dtype.itemsize, shape.hidden_size, shape.num_attention_heads
    tokens = setup.sequences * setup.length // (layout.data * layout.context)
    inside = 6 * hidden + 2 * shape.num_key_value_heads * shape.head_dim + 3 * shape.intermediate_size
    plain = value * tokens * inside + 4 * tokens * (heads + 2)
    plain += value * context_kept(ContextSizes.of(shape, layout, tokens), setup.context_method)
    a_layer = {
        "none": plain,
        "selective": plain - 4 * tokens * heads,
        "full": value * tokens * hidden,
    }
    layers = shape.num_hidden_layers
    modes = [options.recompute_of(layer, layers) for layer in range(layers)]
    around = value * tokens * (2 * hidden + shape.head_dim) + 4 * tokens * (shape.vocab_size + 1)
    return sum(a_layer[mode] for mode in modes) + around


def measure(names: Iterable[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        setup = CASES[name]
        ranks = setup.layout.world_size
        held = run_ranks(hold, ranks, setup)[0]
        built, rss = run_ranks(grow, ranks, setup)[0]
        expected = formula(setup)
        row: dict[str, Any] = {"case": name}
        for part in PARTS:
            row[part] = getattr(held, part)
            row[f"{part}_by_formula"] = round(expected[part])
        row |= {"other": held.other, "peak": held.peak, "peak_in": held.peak_in, "built": built, "rss": rss}
        alone = next((each["activations"] for each in [*rows, row] if each["case"] == ALONE), None)
        shared = setup.layout.context > 1 and alone is not None
        row["of_ideal"] = round(alone / ranks / row["activations"], 3) if shared else None
        rows.append(row)
    return rows


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {part: f"{row[part] / MIB:.1f} ({row[f'{part}_by_formula'] / MIB:.1f})" for part in PARTS}
    return {**row, **shown, **{key: f"{row[key] / MIB:.1f}" for key in ("other", "peak", "built", "rss")}}


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases with this in their names")
    arguments = report.arguments_of(parser)
    facts = report.machine()
    names = [name for name in (QUICK if arguments.quick else CASES) if arguments.only in name]
    rows = measure(names)
    columns = {key: key for key in ("case", *PARTS, "other", "peak", "peak_in", "built", "rss", "of_ideal")}
    report.show("MiB of a rank: counted (by formula)", [_shown(row) for row in rows], columns)
    report.write("memory", facts, {"quick": arguments.quick, "unit": "bytes"}, rows, arguments.results)


if __name__ == "__main__":
    main()
