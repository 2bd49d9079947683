"""How a parameter is cut: said once, read by init, clipping, checkpoint, export and the planner."""

from dataclasses import dataclass
from math import prod

from megalite.topology.layout import balanced_split


@dataclass(frozen=True)
class Box:
    """A rectangular region of a full tensor: where it starts and how long it is in each dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Part:
    """A canonical tensor inside a registered parameter: its name and its full, true shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardSpec:
    """How a registered parameter lies on the mesh.

    dim: the tensor dim that is cut over the mesh axis `axis`; None: every rank of the axis has it whole.
    parts: the canonical tensors it is made of, stacked along dim 0; each part is cut on its own, so a fused
        query-key-value weight gives every tensor-parallel rank its share of all three.
    stages: the pipeline stages that hold a copy; more than one means tied, and gradients are summed over them.
    summed: every rank of the axis has it whole, and uses it for what only that rank holds (the norms of single
        heads): the gradient is the sum over the axis.

    Sizes that the axis does not divide are cut unevenly (the first ranks hold one row more): nothing is padded.
    """

    parts: tuple[Part, ...]
    dim: int | None = None
    axis: str = "tp"
    stages: tuple[int, ...] = ()
    summed: bool = False

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the registered parameter on one rank."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def box(self, part: Part, index: int, size: int) -> Box:
        """The region of `part` that rank `index` of the `size` ranks of the axis holds."""
        offsets, shape = [0] * len(part.shape), list(part.shape)
        if self.dim is not None:
            held = balanced_split(part.shape[self.dim], size)[index]
            offsets[self.dim], shape[self.dim] = held.start, len(held)
        return Box(tuple(offsets), tuple(shape))

    def boxes(self, index: int, size: int) -> tuple[tuple[Part, Box], ...]:
        """Each part with the region of it that rank `index` holds, in the order of the parameter's dim 0."""
        return tuple((part, self.box(part, index, size)) for part in self.parts)

    def local_shape(self, index: int, size: int) -> tuple[int, ...]:
        """Shape of the registered parameter on rank `index` of `size`."""
        shapes = [box.shape for _, box in self.boxes(index, size)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
