"""Calibration: the seconds that one machine takes for the parts of a training step, and its file. No torch.

Only times are kept, as they were measured; planner/machine_rates.py makes rates of them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from megalite.errors import ConfigError, Problem, named
from megalite.topology.adapter import PROJECTIONS, Lora
from megalite.topology.shape import ModelShape

VERSION = 1
"""The version of the file: another one has other fields or other meanings."""
DEFAULT_FILE = "calibration.json"
"""In the working folder; `megalite plan --calibrate` writes it and `megalite train` looks for it."""
LinkKind = Literal["all_reduce", "all_gather", "reduce_scatter", "message"]


@dataclass(frozen=True)
class ProductTime:
    """Seconds of [tokens, inputs] times a weight [outputs, inputs], and of the two products of its backward."""

    tokens: int
    inputs: int
    outputs: int
    forward: float
    of_inputs: float
    of_weight: float


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of causal attention of [rows, length, heads, head_dim]."""

    rows: int
    length: int
    heads: int
    head_dim: int
    forward: float
    backward: float


@dataclass(frozen=True)
class ProbeModel:
    """A Llama with tied tables and as many key-value heads as heads, and its micro batch of [rows, length] tokens.

    lora: the rank of the adapters of its linears, which alone are trained then; 0: it has none. recomputed: backward
    computes the attention of each layer again.
    """

    rows: int
    length: int
    hidden: int
    intermediate: int
    heads: int
    layers: int
    vocabulary: int
    lora: int = 0
    recomputed: bool = False

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
            adapter=Lora(self.lora, self.lora, PROJECTIONS) if self.lora else None,
        )


@dataclass(frozen=True)
class ModelTime:
    """Seconds of forward and backward of all layers with embedding, head and loss."""

    model: ProbeModel
    forward: float
    backward: float


@dataclass(frozen=True)
class UpdateTime:
    """Seconds of the norm of the gradient and of one update of so many trained values in so many tensors."""

    optimizer: str
    values: int
    tensors: int
    seconds: float


@dataclass(frozen=True)
class WholeStepTime:
    """Seconds of a whole training step with AdamW, every rank with its own micro batches. zero: ZeRO's stage."""

    model: ProbeModel
    micro_batches: int
    zero: int
    seconds: float


@dataclass(frozen=True)
class LinkTime:
    """Seconds of a collective of so many bytes (of the result of a gather, of the input of a scatter), or a message."""

    kind: LinkKind
    size: int
    seconds: float


@dataclass(frozen=True)
class MeasuredRanks:
    """Times while `ranks` ranks of this machine compute the same at once. threads: of each rank.

    alone: the pace of one of them while the others wait, in units of its pace while all compute.
    """

    ranks: int
    threads: int
    precision: str
    alone: float
    products: Sequence[ProductTime]
    attention: Sequence[AttentionTime]
    models: Sequence[ModelTime]
    updates: Sequence[UpdateTime]
    steps: Sequence[WholeStepTime]


@dataclass(frozen=True)
class MeasuredLinks:
    """Times of collectives in groups of `group` ranks, while `ranks` ranks of this machine are in such groups.

    models: precision -> times of models that each group shares by tensor parallelism: what their sums take there.
    """

    ranks: int
    group: int
    times: Sequence[LinkTime]
    models: Mapping[str, Sequence[ModelTime]] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibration:
    """The measurements of one machine.

    machine: its host name. device: "cpu" or the card's name as torch has it. units: its cards, or its cores without
    cards. memory: bytes of a card, or of the machine without cards. kernels: who computes the operators.
    """

    machine: str
    device: str
    units: int
    memory: int
    torch: str
    kernels: str
    computing: Sequence[MeasuredRanks]
    links: Sequence[MeasuredLinks]
    version: int = VERSION

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(measured.precision for measured in self.computing))


def write_calibration(calibration: Calibration, file: Path) -> None:
    with named(file):
        file.write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")


def calibration_of(content: Any) -> Calibration:
    """Return the calibration of which `asdict`, or JSON, gave the content. Raises pydantic.ValidationError."""
    return TypeAdapter(Calibration).validate_python(content)


def read_calibration(file: Path) -> Calibration:
    """Read a calibration file. Raises ConfigError if the file is missing, broken or of another version."""
    remedy = f"measure this machine anew: megalite plan MODEL --calibrate --calibration {file}"

    def refused(message: str) -> ConfigError:
        return ConfigError([Problem("--calibration", f"{file} {message}", remedy)])

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise refused(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise refused(f"is not JSON: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise refused(f"has version {version}, and this megalite reads version {VERSION}")
    try:
        return calibration_of(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise refused(f"is no calibration: {place}: {first['msg']}") from error
