"""The optimizers as records: their names, settings, state and demands. No torch.

The mathematics of an optimizer is the module of its name in train/optimizer/, whose `make` returns it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megalite.topology.parameters import Parameter
from megalite.topology.sharding import Part

MOMENTUM = "momentum_buffer"
FIRST_MOMENT, SECOND_MOMENT = "exp_avg", "exp_avg_sq"
ROW_MOMENT, COLUMN_MOMENT, VECTOR_MOMENT = "row_var", "col_var", "variance"


def _is_matrix(parameter: Parameter) -> bool:
    return len(parameter.spec.full_shape) == 2


@dataclass(frozen=True)
class OptimizerStateKey:
    """One state of an optimizer, shaped and cut like its parameter.

    of: whether a parameter has it. kept: the dim of a matrix that it has one value for, as [rows, 1] or [1, columns].
    """

    key: str
    of: Callable[[Parameter], bool] = lambda parameter: True
    kept: int | None = None

    def parameter(self, parameter: Parameter) -> Parameter:
        """Return how the state of a parameter is shaped and cut.

        The moments of rows and columns are cut where these are: those of a matrix that is split by rows are split for
        its rows, and the same on every rank for its columns.
        """
        if self.kept is None:
            return parameter
        spec, split = parameter.spec, parameter.spec.dim == self.kept
        parts = tuple(
            Part(part.name, self.shape(part.shape), part.heads if split else None) for part in spec.parts
        )
        return replace(parameter, spec=replace(spec, parts=parts, dim=self.kept if split else None))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the state of a canonical tensor."""
        if self.kept is None:
            return shape
        return (shape[0], 1) if self.kept == 0 else (1, shape[1])


@dataclass(frozen=True)
class DeepSpeedForm:
    """An optimizer in DeepSpeed's JSON.

    types: what `optimizer.type` calls it, ours first. classes: classes of DeepSpeed that compute its update; people
    write their names, which DeepSpeed refuses as a type. defaults: parameter -> DeepSpeed's default, of those that are
    settings here. fixed: options of the update -> the only supported value. free: options of how an implementation
    computes, of which megalite has its own.
    """

    types: tuple[str, ...]
    defaults: Mapping[str, Any]
    classes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that DeepSpeed takes."""
        return (*self.defaults, *self.fixed, *self.free)


@dataclass(frozen=True)
class OptimizerRecord:
    """Facts about an optimizer for the configuration, the memory estimate and checkpoints.

    name: `optimizer.name`, and the module of its mathematics. state: all states that it can have. settings: those of
    betas, eps and momentum that it reads; every optimizer reads the others. momentum: its default where it has one.
    whole_matrices: it computes with whole matrices, which ZeRO's partitions cut through. native: DeepSpeed has a
    compiled form of it, deepspeed.native_optimizer. working: values that an update makes meanwhile, a trained weight;
    working_on_largest, working_on_matrix: the same for each value of the largest weight, or of the largest one of a
    layer, where weights are updated one by one.
    deepspeed: its form in DeepSpeed's JSON; None: DeepSpeed has none,
    or one of another rule. note: for the description of `optimizer.name`.
    """

    name: str
    state: tuple[OptimizerStateKey, ...]
    settings: tuple[str, ...] = ()
    momentum: float | None = None
    whole_matrices: bool = False
    native: bool = False
    working: int = 0
    working_on_largest: int = 0
    working_on_matrix: int = 0
    deepspeed: DeepSpeedForm | None = None
    note: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(state.key for state in self.state)

    def states_of(self, parameter: Parameter, momentum: float | None) -> tuple[OptimizerStateKey, ...]:
        """Return the states of a parameter. A record whose default momentum is 0 keeps none for momentum 0."""
        without = {MOMENTUM} if self.momentum == 0 and not momentum else set()
        return tuple(state for state in self.state if state.key not in without and state.of(parameter))


_MOMENTS = (OptimizerStateKey(FIRST_MOMENT), OptimizerStateKey(SECOND_MOMENT))
# DeepSpeed's "Adam" and its classes take the weight decay into the gradient where one of these is false.
DECOUPLED = ("adam_w_mode", "adamw_mode")

_EVERY = (
    OptimizerRecord(
        "adamw",
        _MOMENTS,
        ("betas", "eps"),
        native=True,
        deepspeed=DeepSpeedForm(
            ("AdamW", "Adam"),
            {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
            ("FusedAdam", "DeepSpeedCPUAdam", "CPUAdam"),
            dict(amsgrad=False, bias_correction=True, fp32_optimizer_states=True, maximize=False),
            (*DECOUPLED, "set_grad_none", "torch_adam", "capturable", "differentiable", "foreach", "fused"),
        ),
    ),
    OptimizerRecord(
        "sgd",
        (OptimizerStateKey(MOMENTUM),),
        ("momentum",),
        momentum=0.0,
        working=1,
        deepspeed=DeepSpeedForm(
            ("SGD",),
            {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
            fixed=dict(dampening=0, nesterov=False, maximize=False),
            free=("differentiable", "foreach", "fused"),
        ),
    ),
    OptimizerRecord(
        "lion",
        (OptimizerStateKey(FIRST_MOMENT),),
        ("betas",),
        working=1,
        deepspeed=DeepSpeedForm(
            ("Lion",),
            {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
            ("FusedLion", "DeepSpeedCPULion", "CPULion"),
            {"fp32_optimizer_states": True},
            ("set_grad_none",),
        ),
    ),
    OptimizerRecord(
        "adafactor",
        (
            OptimizerStateKey(ROW_MOMENT, _is_matrix, kept=0),
            OptimizerStateKey(COLUMN_MOMENT, _is_matrix, kept=1),
            OptimizerStateKey(VECTOR_MOMENT, lambda parameter: not _is_matrix(parameter)),
        ),
        whole_matrices=True,
        working_on_largest=1,
    ),
    OptimizerRecord(
        "muon",
        (
            OptimizerStateKey(MOMENTUM, lambda parameter: parameter.is_hidden_matrix),
            *(replace(state, of=lambda parameter: not parameter.is_hidden_matrix) for state in _MOMENTS),
        ),
        ("betas", "eps", "momentum"),
        momentum=0.95,
        whole_matrices=True,
        working_on_matrix=3,
        note="adamw for embeddings, head, norms and biases",
    ),
)
OPTIMIZERS: dict[str, OptimizerRecord] = {record.name: record for record in _EVERY}


def optimizers_with(setting: str) -> tuple[OptimizerRecord, ...]:
    """Return the optimizers that read a setting of [optimizer]."""
    return tuple(record for record in OPTIMIZERS.values() if setting in record.settings)


def states_with(keys: Collection[str]) -> tuple[OptimizerStateKey, ...]:
    """Return the states of the optimizer with the fewest states among those that have all of these keys; none: ().

    A checkpoint says its keys. Optimizers with the same keys have them for the same parameters.
    """
    fitting = [record.state for record in OPTIMIZERS.values() if set(keys) <= set(record.keys)]
    return min(fitting, key=len, default=())
