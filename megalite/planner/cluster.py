"""The cards and links of a cluster, as far as their data sheets say: memory, peak, bandwidth, power."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from megalite.errors import ConfigError, Problem
from megalite.monitor.cards import CARDS, peak_flops

GIB = 2**30


@dataclass(frozen=True)
class CardFacts:
    """memory_gib: as torch reports it, rounded down. link: GB/s in one direction to the other cards of its node.

    watts: the most that the card takes.
    """

    memory_gib: int
    link: float
    watts: float


# NVLink of generation 2, 3, 4, 5 and PCI Express of generation 3, 4, 5 with 16 lanes: GB/s in one direction.
_NVLINK = {2: 150, 3: 300, 4: 450, 5: 900}
_PCIE = {3: 16, 4: 32, 5: 64}
FACTS: Mapping[str, CardFacts] = {
    "Tesla V100-SXM2-16GB": CardFacts(15, _NVLINK[2], 300),
    "Tesla V100-SXM2-32GB": CardFacts(31, _NVLINK[2], 300),
    "Tesla T4": CardFacts(14, _PCIE[3], 70),
    "A100-SXM4-40GB": CardFacts(39, _NVLINK[3], 400),
    "A100-SXM4-80GB": CardFacts(79, _NVLINK[3], 400),
    "A100-PCIE-40GB": CardFacts(39, _PCIE[4], 250),
    "A100 80GB PCIe": CardFacts(79, _PCIE[4], 300),
    "A10": CardFacts(22, _PCIE[4], 150),
    "A40": CardFacts(44, _PCIE[4], 300),
    "GeForce RTX 3090": CardFacts(23, _PCIE[4], 350),
    "RTX A6000": CardFacts(47, _PCIE[4], 300),
    "L4": CardFacts(22, _PCIE[4], 72),
    "L40S": CardFacts(44, _PCIE[4], 350),
    "GeForce RTX 4090": CardFacts(23, _PCIE[4], 450),
    "RTX 6000 Ada Generation": CardFacts(47, _PCIE[4], 300),
    "H100 80GB HBM3": CardFacts(79, _NVLINK[4], 700),
    "H100 PCIe": CardFacts(79, _PCIE[5], 350),
    "H100 NVL": CardFacts(93, 300, 400),
    "H200": CardFacts(139, _NVLINK[4], 700),
    "H200 NVL": CardFacts(139, _NVLINK[4], 600),
    "B200": CardFacts(178, _NVLINK[5], 1000),
    "GeForce RTX 5090": CardFacts(31, _PCIE[5], 575),
    "AMD Instinct MI300X": CardFacts(191, 448, 750),
    "AMD Instinct MI325X": CardFacts(255, 448, 1000),
}


class Machine(Protocol):
    """The ranks to plan for: a `Cluster`, or a machine that was measured.

    card: the name of a rank's device. memory_bytes: of a rank's device. usable: the share of it to plan with. watts:
    the most that a card takes; None: unknown. on_cpu: whether ranks compute on the host. assumptions: for people, where
    the seconds come from.
    """

    @property
    def card(self) -> str: ...

    @property
    def nodes(self) -> int: ...

    @property
    def cards_per_node(self) -> int: ...

    @property
    def cards(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def usable(self) -> float: ...

    @property
    def watts(self) -> float | None: ...

    @property
    def on_cpu(self) -> bool: ...

    @property
    def assumptions(self) -> str: ...

    def peak(self, precision: str) -> float | None:
        """Return the FLOP/s of one card; None if there are none in this precision."""


@dataclass(frozen=True)
class Cluster:
    """Equal cards in equal nodes.

    network: GB/s of a card in one direction to other nodes. efficiency: the share of the card's peak that matrix
    products reach by themselves. link_efficiency: the share of a link's rate that collectives reach. usable: the share
    of a card's memory that a run may plan with; the rest is for fragments and libraries.
    """

    card: str
    nodes: int = 1
    cards_per_node: int = 8
    network: float = 50.0
    efficiency: float = 0.55
    link_efficiency: float = 0.75
    usable: float = 0.92

    @property
    def cards(self) -> int:
        return self.nodes * self.cards_per_node

    @property
    def facts(self) -> CardFacts:
        return FACTS[self.card]

    @property
    def memory_bytes(self) -> int:
        return self.facts.memory_gib * GIB

    @property
    def watts(self) -> float | None:
        return self.facts.watts

    @property
    def on_cpu(self) -> bool:
        return False

    @property
    def assumptions(self) -> str:
        return (
            f"assumed: matrix products at {self.efficiency:.0%} of the card's peak, links at "
            f"{self.link_efficiency:.0%} of their rate, {self.network:g} GB/s a card between nodes"
        )

    def peak(self, precision: str) -> float | None:
        """Return the FLOP/s of one card; None if the card has no such tensor cores."""
        return peak_flops(self.card, precision)

    def bandwidth(self, ranks: int, stride: int, *, ring: bool = True) -> float:
        """Return the bytes a second of each card among `ranks` ranks that are `stride` ranks apart.

        ring: collectives, whose rings leave a node by the network of each of its cards that takes part, as NCCL's do.
        Otherwise one card sends to another, of the next node at worst.
        """
        if ranks * stride <= self.cards_per_node:
            return self.facts.link * 1e9 * self.link_efficiency
        cards = max(1, self.cards_per_node // stride) if ring else 1
        return min(cards * self.network, self.facts.link) * 1e9 * self.link_efficiency


def card_named(name: str) -> str:
    """Return the name of a card of the table. Raises ConfigError with the nearest names for another one."""
    plain = name.removeprefix("NVIDIA ")
    if plain in FACTS:
        return plain
    parts = [known for known in FACTS if plain.lower() in known.lower()]
    near = parts or get_close_matches(plain, FACTS, n=3, cutoff=0.3)
    beside = " (its peak is known, its memory and links are not)" if plain in CARDS else ""
    remedy = f"use one of {', '.join(near)}" if near else f"use one of {', '.join(FACTS)}"
    cure = {"--card": near[0]} if near else {}
    raise ConfigError([Problem("--card", f'there is no card "{name}"{beside}', remedy, cure, value=name)])
