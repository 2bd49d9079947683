"""Several low-rank adapters beside one stage: requests with different ones share each forward. For inference alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.model.lora import lora_shares
from megalite.model.replica import Replica
from megalite.parallel.int8 import Int8Linear
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.lora import LoraShare, part_blocks
from megalite.parallel.lora_bank import LoraBank, Selection
from megalite.topology.adapter import Lora


@dataclass(frozen=True)
class AdaptedLinear:
    """An adapter of one linear of this rank: what is to be loaded, and where it goes."""

    share: LoraShare
    bank: LoraBank
    number: int
    scale: float

    def fill(self, a: Tensor, b: Tensor) -> None:
        """Take A and B, as of `LoraShare`."""
        self.bank.fill(self.number, a, part_blocks(b * self.scale, self.share.parts))


class Adapters:
    """The adapters beside a stage, by name. Without any, every token is the model's own."""

    def __init__(self, names: Sequence[str] = ()):
        self._numbers: dict[str | None, int | None] = {None: None}
        self._numbers |= {name: number for number, name in enumerate(names)}

    def chosen(self, names: Sequence[str | None], device: torch.device) -> Selection | None:
        """Return the selection of each of the T tokens' adapter, None for no adapter; None if no token has one."""
        numbers = [self._numbers[name] for name in names]
        return Selection(numbers, device) if set(numbers) - {None} else None


def add_banks(replica: Replica, loras: Mapping[str, Lora]) -> tuple[Adapters, dict[str, list[AdaptedLinear]]]:
    """Give the linears of a stage banks of adapters, with values of zero.

    Returns the adapters, and name -> each linear that this adapter changes, to be filled.
    """
    adapters = Adapters(tuple(loras))
    to_fill: dict[str, list[AdaptedLinear]] = {name: [] for name in loras}
    for layer in map(int, replica.stage.model.layers):
        shares = {
            name: lora_shares(replace(replica.shape, adapter=lora), layer, replica.mesh)
            for name, lora in loras.items()
        }
        for within, bank in _banks(replica, layer, list(shares.values())):
            for number, (name, lora) in enumerate(loras.items()):
                if within in shares[name]:
                    to_fill[name].append(AdaptedLinear(shares[name][within], bank, number, lora.scale))
    return adapters, to_fill


def _banks(
    replica: Replica, layer: int, shares: Sequence[Mapping[str, LoraShare]]
) -> Iterator[tuple[str, LoraBank]]:
    """Add a bank to each linear of a layer that an adapter changes; yield the linear's name and its bank."""
    mesh, decoder_layer = replica.mesh, replica.stage.model.layers[str(layer)]
    for within in dict.fromkeys(name for each in shares for name in each):
        linear = decoder_layer.get_submodule(within)
        assert isinstance(linear, ColumnParallelLinear | RowParallelLinear | Int8Linear)
        outputs, inputs = linear.weight.shape
        widths = [mesh.local_shape(each[within].a)[0] if within in each else 0 for each in shares]
        linear.bank = LoraBank(widths, inputs, outputs, dtype=replica.stage.dtype, device=mesh.device)
        yield within, linear.bank
