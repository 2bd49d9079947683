"""Open the files of DeepSpeed's pipeline engine: tensors of pipeline layers, and the arguments."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megalite.checkpoint.region_reader import TYPES
from megalite.convert.deepspeed.model_states import ModelStates
from megalite.convert.deepspeed.neox_settings import read_settings
from megalite.convert.deepspeed.pipeline_folder import PipelineFolder
from megalite.convert.deepspeed.pipeline_names import is_ignored
from megalite.convert.foreign.unpickle import Foreign, load_pickle
from megalite.convert.megatron.arguments import Arguments
from megalite.errors import CheckpointError

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


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


def arguments_of(folder: PipelineFolder) -> tuple[Arguments, bool]:
    """Return the checkpoint's description of its model, and whether it is Megatron-DeepSpeed's.

    Raises CheckpointError if it has none.
    """
    content = ModelStates.open(folder.states[0]).table if folder.states else {}
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
