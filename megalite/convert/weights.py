"""Open weights of any source, and load adapters beside a model. A format that is read has its reader in `_READERS`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from megalite.checkpoint.failures import explain
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.weights import WeightReader, targets
from megalite.convert.huggingface.load import HuggingFaceReader
from megalite.convert.huggingface.new_rows import NewRows
from megalite.convert.peft.merged import AdaptedWeights
from megalite.convert.peft.read import open_adapter
from megalite.convert.weight_source import WeightSource
from megalite.model.adapters import AdaptedLinear, Adapters, add_banks
from megalite.model.replica import Replica
from megalite.parallel.mesh import all_or_none
from megalite.topology.adapter import Lora
from megalite.topology.parameters import Parameter

_READERS: Mapping[str, Callable[[WeightSource, NewRows | None], WeightReader]] = {
    "checkpoint": lambda source, _: CheckpointReader(source.folder, weights=None),
    "huggingface": lambda source, new_rows: HuggingFaceReader(
        source.folder, source.shape.base, new_rows=new_rows, int8=source.int8
    ),
    "peft": lambda source, _: open_adapter(source.folder, source.shape),
}


@contextmanager
def open_weights(source: WeightSource, new_rows: NewRows | None = None) -> Iterator[WeightReader]:
    """Open weights where the `with` block begins, as `fill` does on every rank: those of `source.read_shape`.

    A checkpoint's are its exact ones ("master" where it exists). new_rows: rows of the vocabulary that are the mean of
    others, of a Hugging Face folder. Raises CheckpointError if the files do not hold exactly the tensors of the model.
    """
    with _READERS[source.format](source, new_rows) as reader:
        if source.base is None:
            yield reader
        else:
            with AdaptedWeights(reader, source.shape, source.base) as adapted:
                yield adapted


def load_adapters(named: Mapping[str, WeightSource], replica: Replica) -> Adapters:
    """Load low-rank adapters by name beside a loaded model, for this rank's stage; collective over the world.

    Raises CheckpointError, on every rank alike.
    """
    loras = {name: source.shape.adapter for name, source in named.items()}
    adapters, to_fill = add_banks(
        replica, {name: lora for name, lora in loras.items() if isinstance(lora, Lora)}
    )
    for name, source in named.items():
        load = partial(_fill_banks, source, to_fill[name], replica)
        all_or_none(replica.mesh, load, explain(replica.mesh, f"load the adapter {name} from", source.folder))
    return adapters


def _fill_banks(source: WeightSource, linears: Sequence[AdaptedLinear], replica: Replica) -> None:
    exact = torch.promote_types(replica.stage.dtype, torch.float32)
    with open_weights(source) as reader:

        def read(parameter: Parameter) -> Tensor:
            tensor = torch.empty(replica.mesh.local_shape(parameter), dtype=exact)
            reader.fill_all(targets(parameter, tensor, replica.mesh))
            return tensor

        for linear in linears:
            linear.fill(read(linear.share.a), read(linear.share.b))
