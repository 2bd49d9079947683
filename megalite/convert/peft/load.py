"""Load a model with its adapter, merged into its weights or beside them, or several adapters beside one model.

Every rank reads the regions that it holds.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.failures import explain
from megalite.checkpoint.load import load_checkpoint, load_parameter
from megalite.checkpoint.reader import BLOCK_ELEMENTS
from megalite.convert.average import AveragedWeights
from megalite.convert.huggingface.load import load_huggingface
from megalite.convert.peft.merged import MergedWeights
from megalite.convert.peft.named import NamedAdapter
from megalite.convert.peft.read import LoraReader, load_adapter
from megalite.model.adapters import AdaptedLinear, Adapters, add_banks
from megalite.model.replica import Replica
from megalite.parallel.mesh import all_or_none
from megalite.topology.parameters import Parameter
from megalite.topology.shape import ModelShape


def load_beside(folder: Path, base: Path, replica: Replica, *, is_peft: bool) -> None:
    """Fill this rank's stage of a model with an adapter from the two; collective over the world.

    folder: the adapter: PEFT's, or a checkpoint. base: the Hugging Face folder of the frozen weights. Raises
    CheckpointError, on every rank alike.
    """
    load_huggingface(base, replica)
    if is_peft:
        load_adapter(folder, replica)
    else:
        load_checkpoint(folder, replica)


def load_merged(folder: Path, shape: ModelShape, base: Path, replica: Replica, *, is_peft: bool) -> None:
    """Fill this rank's stage of a model without adapter with base and adapter, merged; collective over the world.

    folder: the adapter: PEFT's, or a checkpoint. shape: of the model with its adapter. base: the Hugging Face folder of
    the frozen weights. Raises CheckpointError, on every rank alike.
    """

    def load() -> None:
        tensors = replica.tensors
        with (
            _opened(folder, shape, is_peft=is_peft) as adapter,
            MergedWeights(adapter, shape, base) as merged,
        ):
            for parameter in replica.parameters:
                tensor = tensors[parameter.name]
                load_parameter(merged, parameter, tensor, replica.mesh, most_elements=BLOCK_ELEMENTS)

    all_or_none(replica.mesh, load, explain(replica.mesh, "load", folder))


def load_adapters(named: Mapping[str, NamedAdapter], replica: Replica) -> Adapters:
    """Load adapters by name beside a loaded model, for this rank's stage; collective over the world.

    Raises CheckpointError, on every rank alike.
    """
    adapters, to_fill = add_banks(replica, {name: each.lora for name, each in named.items()})
    for name, each in named.items():
        fill = partial(_fill, each, to_fill[name], replica)
        all_or_none(replica.mesh, fill, explain(replica.mesh, f"load the adapter {name} from", each.folder))
    return adapters


def _fill(adapter: NamedAdapter, linears: Sequence[AdaptedLinear], replica: Replica) -> None:
    exact = torch.promote_types(replica.stage.dtype, torch.float32)
    with _opened(adapter.folder, adapter.shape, is_peft=adapter.is_peft) as reader:

        def read(parameter: Parameter) -> Tensor:
            tensor = torch.empty(replica.mesh.local_shape(parameter), dtype=exact)
            load_parameter(reader, parameter, tensor, replica.mesh)
            return tensor

        for each in linears:
            each.fill(read(each.share.a), read(each.share.b))


def _opened(folder: Path, shape: ModelShape, *, is_peft: bool) -> LoraReader | AveragedWeights:
    """Open an adapter's trained tensors; a context manager. shape: of the model with its adapter."""
    return LoraReader(folder, shape) if is_peft else AveragedWeights([folder])
