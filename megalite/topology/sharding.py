"""How a parameter is cut: said once, read by init, clipping, checkpoint, export and the planner."""

from dataclasses import dataclass
from math import prod

from megalite.topology.stages import balanced_split


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
    """A canonical tensor inside a registered parameter: its name and its full, true shape.

    heads: the cut dim consists of so many equal heads (heads), which are not cut; None: it may be cut anywhere.
    """

    name: str
    shape: tuple[int, ...]
    heads: int | None = None


def heads_fit(heads: int, size: int) -> bool:
    """Whether `size` ranks can hold that many heads: as many each, or one each that as many neighbours share."""
    return heads % size == 0 or size % heads == 0


def heads_held(heads: int, index: int, size: int) -> range:
    """The heads that rank `index` of `size` holds; where there are fewer than ranks, size / heads neighbours share one.

    So query heads stay with their key-value head: rank r's are r h / n to (r + 1) h / n, and head q's is q k / h.
    Raises ValueError where neither number divides the other.
    """
    if not heads_fit(heads, size):
        raise ValueError(f"{size} ranks cannot hold {heads} heads evenly, nor share them")
    if heads >= size:
        return balanced_split(heads, size)[index]
    unit = index * heads // size
    return range(unit, unit + 1)


@dataclass(frozen=True)
class ShardSpec:
    """How a registered parameter lies on the mesh.

    dim: the tensor dim that is cut over the mesh axis `axis`; None: every rank of the axis has it whole.
    parts: the canonical tensors it is made of, stacked along dim 0; each part is cut on its own, so a fused
        query-key-value weight gives every tensor-parallel rank its share of all three.
    stages: the pipeline stages that hold a copy; more than one means tied, and gradients are summed over them.
    summed: every rank of the axis has it whole, and uses it for what only that rank holds (the norms of single
        heads): the gradient is the sum over the axis.

    A part of fewer heads than ranks is held by several: its gradient is the sum over them, and counts on the first.
    Other sizes that the axis does not divide are cut unevenly (the first ranks hold one row more): nothing is padded.
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
            if part.heads is None:
                held = balanced_split(part.shape[self.dim], size)[index]
            else:
                length, heads = part.shape[self.dim] // part.heads, heads_held(part.heads, index, size)
                held = range(heads.start * length, heads.stop * length)
            offsets[self.dim], shape[self.dim] = held.start, len(held)
        return Box(tuple(offsets), tuple(shape))

    def boxes(self, index: int, size: int) -> tuple[tuple[Part, Box], ...]:
        """Each part with the region of it that rank `index` holds, in the order of the parameter's dim 0."""
        return tuple((part, self.box(part, index, size)) for part in self.parts)

    def is_shared(self, part: Part, size: int) -> bool:
        """Whether `part` is cut, into fewer pieces than there are ranks."""
        return self.dim is not None and part.heads is not None and part.heads < size

    def first_holder(self, part: Part, index: int, size: int) -> int:
        """The first of the ranks that hold the same region of `part` as rank `index`."""
        if self.dim is None:
            return 0
        holders = size // part.heads if part.heads is not None and part.heads < size else 1
        return index // holders * holders

    def local_shape(self, index: int, size: int) -> tuple[int, ...]:
        """Shape of the registered parameter on rank `index` of `size`."""
        shapes = [box.shape for _, box in self.boxes(index, size)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
