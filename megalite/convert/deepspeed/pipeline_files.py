"""Open the files of DeepSpeed's pipeline engine: tensors of pipeline layers, counters and arguments of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.region_reader import TYPES
from megalite.convert.deepspeed.neox_settings import read_settings
from megalite.convert.deepspeed.pipeline_folder import PipelineFolder
from megalite.convert.deepspeed.pipeline_names import is_ignored
from megalite.convert.foreign.unpickle import Foreign, load_pickle
from megalite.convert.megatron.arguments import Arguments
from megalite.errors import CheckpointError

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_LARGEST_COUNT = 1 << 53


def open_layer(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a layer's file, memory-mapped. Raises CheckpointError if it is not such a file."""
    content = load_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds no dict, so it is no layer's file of DeepSpeed's pipeline engine"
        )
    tensors = {str(name): value for name, value in content.items() if not is_ignored(str(name))}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a tensor; fetch it again")
        if value.dtype not in TYPES.values():
            raise CheckpointError(f"{path}: {name} is {value.dtype}; save the weights as bf16, fp16 or fp32")
    return tensors


@dataclass(frozen=True)
class EngineState:
    """The plain part of one rank's model_states. content: the whole table, as it was unpickled."""

    path: Path
    content: Mapping[str, Any]

    def count(self, *names: str) -> int:
        """Return the first of the counters that is there; 0 without any. Raises CheckpointError for no number."""
        for name in names:
            if (value := self.content.get(name)) is not None:
                if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_COUNT:
                    raise CheckpointError(
                        f"{self.path}: {name} is {value!r}, which is no count; fetch it again"
                    )
                return value
        return 0


def open_state(path: Path) -> EngineState:
    """Open a rank's model_states. Raises CheckpointError if it is not such a file."""
    content = load_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no dict, so it is no model_states of DeepSpeed's engine")
    return EngineState(path, content)


def arguments_of(folder: PipelineFolder) -> tuple[Arguments, bool]:
    """Return the checkpoint's description of its model, and whether it is Megatron-DeepSpeed's.

    Raises CheckpointError if it has none.
    """
    content = open_state(folder.states[0]).content if folder.states else {}
    said = content.get("args")
    if isinstance(said, Foreign) and said.type_name in _NAMESPACES:
        # Tensors are dropped: comparing one with a plain value does not give a bool.
        plain = {name: value for name, value in said.fields.items() if not isinstance(value, Tensor)}
        return Arguments(plain, folder.states[0]), True
    few = (
        {name: value for name, value in said.items() if not isinstance(value, Tensor)}
        if isinstance(said, Mapping)
        else {}
    )
    return read_settings(folder.path, few), False
