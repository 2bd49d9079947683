"""Load pickled checkpoints of other projects without running their code: tensors, plain values and stand-ins.

torch's restricted unpickler calls only what it is given. It is given stand-ins under the full names of the classes that
Megatron-LM, DeepSpeed and transformers write, so none has to be installed.
"""

import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import SEEK_END
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from megalite.errors import CheckpointError

_ZIP = b"PK\x03\x04"
_FORBIDDEN = re.compile(r"GLOBAL ([\w.<>]+)")


class Foreign:
    """A stand-in for an object whose class is not loaded; holds its data and has no behaviour.

    type_name: the full name of its class. arguments: its constructor's arguments, for example an enum's value.
    fields: its attributes, for example those of an argparse.Namespace. state: pickled state that is not a dict of
    attributes.
    """

    type_name = ""
    arguments: tuple[Any, ...]
    fields: dict[str, Any]
    state: Any

    def __new__(cls, *arguments: Any) -> "Foreign":
        made = super().__new__(cls)
        made.arguments, made.fields, made.state = arguments, {}, None
        return made

    def __setstate__(self, state: Any) -> None:
        values, slots = state if _is_of_slots(state) else (state, None)
        if not isinstance(values, Mapping | None):
            self.state = state
        for table in (values, slots):
            if isinstance(table, Mapping):
                self.fields.update(table)

    def __repr__(self) -> str:
        return f"{self.type_name}({', '.join(map(repr, self.arguments))})"


def load_pickle(path: Path) -> Any:
    """Load a file of torch.save, with a Foreign for each object of a class; tensors are memory-mapped.

    Files from before torch 1.6 are read whole. Raises CheckpointError if the file cannot be read, is damaged, names
    anything without a stand-in, or has a tensor that is not dense or larger than the file. No code that the file names
    is ever run.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
            size_bytes = file.seek(0, SEEK_END)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    content = _load(path, path, mmap=is_zip)
    _require_stored(content, path, size_bytes)
    return content


def load_pickled_bytes(file: IO[bytes], name: object) -> Any:
    """Load what torch.save wrote to an open file as `load_pickle` does, but read and not mapped. name: for errors.

    Raises CheckpointError too where a checksum does not match, or the content would be larger than the file.
    """
    try:
        with zipfile.ZipFile(file) as content:
            _require_intact(content, name)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(
            f"{name} is not a complete file of torch.save ({error}); fetch or write it again"
        ) from error
    size_bytes = file.seek(0, SEEK_END)
    file.seek(0)
    content = _load(file, name, mmap=False)
    _require_stored(content, name, size_bytes)
    return content


def _require_intact(file: zipfile.ZipFile, name: object) -> None:
    """Raise CheckpointError for a record that is compressed, as torch maps none, or unlike its checksum."""
    if any(record.compress_type != zipfile.ZIP_STORED for record in file.infolist()):
        raise CheckpointError(f"{name} is compressed, which torch does not do; write it again")
    try:
        damaged = file.testzip()
    except (RuntimeError, ValueError, EOFError) as error:  # encrypted, or a record outside of the file
        raise CheckpointError(
            f"{name} is not a complete file of torch.save ({error}); fetch or write it again"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{name} is damaged: {damaged} does not match its checksum; fetch it again")


def _require_stored(content: Any, name: object, size_bytes: int) -> None:
    """Raise CheckpointError for a tensor of more bytes than its file: an expanded one has any shape with one element.

    Whoever copies a tensor then needs no more memory than the file has bytes.
    """
    seen: set[int] = set()  # an object may stand in itself, or in many others
    left: list[tuple[Any, Any]] = [("the file", content)]
    while left:
        key, value = left.pop()
        if not isinstance(value, Tensor | Mapping | list | tuple | set | Foreign) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_meta:
                raise CheckpointError(f"{name}: {key} is not a dense tensor; write the file again")
            if (claimed := value.numel() * value.itemsize) > size_bytes:
                raise CheckpointError(
                    f"{name}: {key} has {claimed:,} bytes, but the file {size_bytes:,}; write the file again"
                )
        elif isinstance(value, Foreign):
            left += [*value.fields.items(), (key, value.arguments), (key, value.state)]
        else:
            left += value.items() if isinstance(value, Mapping) else ((key, item) for item in value)


def _load(source: Path | IO[bytes], name: object, *, mmap: bool) -> Any:
    try:
        # torch warns before it fails on a damaged file; the error below is enough.
        with _only_stand_ins(), warnings.catch_warnings(action="ignore"):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a hostile or damaged file can make the unpickler raise anything
        if forbidden := _FORBIDDEN.search(str(error)):
            raise CheckpointError(
                f"{name} asks for {forbidden[1]}, which is not among the classes allowed in such files; no code was"
                " run. If you trust the file, load it with torch and save it again with only tensors and plain values"
            ) from None
        # torch's text advises weights_only=False, which would run the file's code; it is cut off.
        text = str(error).rpartition("WeightsUnpickler error: ")[2].strip() or type(error).__name__
        first = text.splitlines()[0]
        raise CheckpointError(
            f"{name} is not a complete file of torch.save ({first}); fetch or write it again"
        ) from error


def require_undamaged(path: Path) -> None:
    """Read all of a torch.save file; raise CheckpointError if a record is compressed or does not match its checksum.

    Files from before torch 1.6 have no checksums and are not checked.
    """
    try:
        with zipfile.ZipFile(path) as file:
            _require_intact(file, path)
    except zipfile.BadZipFile:
        return  # not a zip file: `load_pickle` reports it
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


@contextmanager
def _only_stand_ins() -> Iterator[None]:
    """Allow only the stand-ins in torch's unpickler, not what libraries have registered at their import."""
    before = get_safe_globals()
    clear_safe_globals()
    try:
        add_safe_globals([(stand_in, name) for name, stand_in in _STAND_INS.items()])
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _is_of_slots(state: Any) -> bool:
    """Whether `state` is the pickled form of an object with __slots__: (its dict or None, its slots)."""
    return isinstance(state, tuple) and len(state) == 2 and all(isinstance(x, Mapping | None) for x in state)


def _dictionary(*_: Any) -> OrderedDict[Any, Any]:
    """Stand in for a defaultdict; the unpickler sets the items afterwards."""
    return OrderedDict()


_NUMBERS = {
    **{"f8": "d", "f4": "f", "f2": "e", "b1": "?"},
    **{"i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H", "u1": "B"},
}


def _number(dtype: Foreign, data: bytes) -> int | float | bool:
    """Convert a numpy scalar to a plain number. Raises ValueError for a dtype that is not numeric."""
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    code = _NUMBERS.get(dtype.arguments[0]) if dtype.type_name == "numpy.dtype" else None
    if code is None or not isinstance(data, bytes):
        raise ValueError(f"a scalar of {dtype} is not a number")
    number: int | float | bool = struct.unpack((">" if order == ">" else "<") + code, data)[0]
    return number


def _named(module: str, *names: str) -> list[str]:
    return [f"{module}.{name}" for name in names]


_PYTHON = [
    "argparse.Namespace",
    "_io.BytesIO",
    "types.SimpleNamespace",
    *_named("pathlib", "Path", "PosixPath", "PurePosixPath"),
    *_named("pathlib._local", "Path", "PosixPath", "PurePosixPath"),
    *_named("datetime", "date", "datetime", "timedelta"),
    *_named("signal", "Signals", "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"),
    # Default factories of defaultdicts; never called.
    *_named("builtins", "bool", "dict", "float", "int", "list", "str", "tuple"),
]
_NUMPY = [
    *_named(
        "numpy", "dtype", "ndarray", "bool_", "float16", "float32", "float64", "int32", "int64", "uint32"
    ),
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
]
_ENUMS = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "PositionEmbeddingType")
_MEGATRON = [
    *_named("megatron.enums", *_ENUMS),
    *_named("megatron.model", *_ENUMS),
    *_named("megatron.model.enums", *_ENUMS),
    *_named("megatron.legacy.model.enums", *_ENUMS),
    *_named("megatron.core.enums", *_ENUMS, "Fp8Recipe", "Fp4Recipe"),
    *_named(
        "megatron.core.transformer.enums",
        *_ENUMS,
        "CudaGraphModule",
        "CudaGraphScope",
        "InferenceCudaGraphScope",
    ),
    *_named("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
    *_named(
        "megatron.core.rerun_state_machine", "RerunMode", "RerunState", "RerunDiagnostic", "Call", "Caller"
    ),
    *_named(
        "megatron.core.optimizer.optimizer_config",
        "OptimizerConfig",
        "AdamOptimizerConfig",
        "SGDOptimizerConfig",
    ),
    *_named("megatron.core.optimizer", "OptimizerConfig"),
    *_named("megatron.core.optimizer.grad_scaler", "ConstantGradScaler", "DynamicGradScaler"),
    *_named("megatron.optimizer.grad_scaler", "ConstantGradScaler", "DynamicGradScaler"),
    *_named("megatron.fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
    *_named("megatron.fp16_deprecated.loss_scaler", "LossScaler", "DynamicLossScaler"),
    *_named("fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
]
_DEEPSPEED = [
    *_named("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
    *_named("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    *_named("deepspeed.runtime.zero.offload_config", "OffloadDeviceEnum"),
    *_named("deepspeed.utils.tensor_fragment", "fragment_address"),
    *_named("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
]
_TRANSFORMERS = [
    *_named("transformers.training_args", "TrainingArguments", "OptimizerNames", "ParallelMode"),
    *_named("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
    *_named(
        "transformers.trainer_utils",
        *(
            "EvaluationStrategy",
            "FSDPOption",
            "HubStrategy",
            "IntervalStrategy",
            "SaveStrategy",
            "SchedulerType",
        ),
    ),
    *_named("transformers.debug_utils", "DebugOption"),
    *_named("transformers.trainer_pt_utils", "AcceleratorConfig"),
    *_named("accelerate.state", "PartialState"),
    *_named("accelerate.utils.dataclasses", "DistributedType"),
    *_named("trl.trainer.sft_config", "SFTConfig"),
    *_named("axolotl.core.training_args", "AxolotlTrainingArguments"),
    *_named("llamafactory.hparams.training_args", "TrainingArguments"),
]

_STAND_INS: dict[str, Callable[..., Any]] = {
    **{
        name: type(name.rsplit(".", 1)[1], (Foreign,), {"type_name": name})
        for name in [*_PYTHON, *_NUMPY, *_MEGATRON, *_DEEPSPEED, *_TRANSFORMERS]
    },
    "collections.defaultdict": _dictionary,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}
