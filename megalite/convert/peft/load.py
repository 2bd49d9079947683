"""Load a model with its adapter, merged into its weights or beside them: every rank reads the regions it holds."""

from contextlib import ExitStack
from pathlib import Path

from megalite.checkpoint.failures import explain
from megalite.checkpoint.load import WeightReader, load_checkpoint, load_parameter
from megalite.checkpoint.reader import BLOCK_ELEMENTS
from megalite.convert.average import AveragedWeights
from megalite.convert.huggingface.load import load_huggingface
from megalite.convert.peft.merged import MergedWeights
from megalite.convert.peft.read import LoraReader, load_adapter
from megalite.model.replica import Replica
from megalite.parallel.mesh import all_or_none
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
        with ExitStack() as stack:
            adapter: WeightReader
            if is_peft:
                adapter = stack.enter_context(LoraReader(folder, shape))
            else:
                adapter = stack.enter_context(AveragedWeights([folder]))
            merged = stack.enter_context(MergedWeights(adapter, shape, base))
            for parameter in replica.parameters:
                tensor = tensors[parameter.name]
                load_parameter(merged, parameter, tensor, replica.mesh, most_elements=BLOCK_ELEMENTS)

    all_or_none(replica.mesh, load, explain(replica.mesh, "load", folder))
