"""ShardSpec: how a parameter is sharded. Init, clipping, checkpoints and exports all read it."""

from dataclasses import dataclass
from math import isqrt, prod

from megalite.topology.stages import balanced_split


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular region of a full tensor: where it starts and how long it is in each dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Part:
    """A canonical tensor inside a registered parameter.

    shape: the full, unpadded shape.
    heads: the number of equal heads along the sharded dim; a head is never cut. None: any row may be a boundary.
    """

    name: str
    shape: tuple[int, ...]
    heads: int | None = None


def heads_fit(heads: int, size: int) -> bool:
    """Return whether `heads` divides `size` or `size` divides `heads`."""
    return heads % size == 0 or size % heads == 0


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order."""
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor * divisor != number]


def tensor_sizes(query_heads: int, key_value_heads: int) -> list[int]:
    """Return the tensor-parallel sizes that suit a model's heads, in ascending order."""
    return [size for size in divisors(query_heads) if heads_fit(key_value_heads, size)]


def heads_held(heads: int, index: int, size: int) -> range:
    """Return the heads of rank `index` of `size`; with fewer heads than ranks, size / heads neighbours share a head.

    Query heads thus stay on the rank of their key-value head (grouped-query attention).
    Raises ValueError where neither number divides the other.
    """
    if not heads_fit(heads, size):
        raise ValueError(
            f"{size} ranks cannot hold {heads} heads evenly, nor share them: neither number divides the other"
        )
    if heads >= size:
        return balanced_split(heads, size)[index]
    unit = index * heads // size
    return range(unit, unit + 1)


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of a registered parameter over the mesh.

    parts: the canonical tensors that the parameter consists of, stacked along dim 0. Each part is sharded by itself,
        so that every rank of the axis has its share of the query, the key and the value of a fused weight.
    dim: the tensor dim that is sharded over the ranks of the axis; None: each of them holds a replica.
    axis: the mesh axis over which the parameter is sharded, a key of `topology.axes.COPIES`.
    stages: the pipeline stages that hold a copy. More than one, the first and the last stage or all: a tied weight,
        whose gradients are summed over them.
    summed: the parameter is replicated, but each rank applies it to its own heads (query and key norms), so its
        gradient is the sum over them.

    A part with fewer heads than ranks is replicated over neighbouring ranks: its gradient is the sum over them, and
    only the first of them counts it in the norm. A size that the ranks do not divide is split unevenly, the first
    ranks hold one row more; nothing is padded.
    """

    parts: tuple[Part, ...]
    dim: int | None = None
    axis: str = "tp"
    stages: tuple[int, ...] = ()
    summed: bool = False

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the registered parameter without sharding."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def slice_of(self, part: Part, index: int, size: int) -> TensorSlice:
        """Return the slice of `part` on rank `index` of the axis, of `size` ranks."""
        offsets, shape = [0] * len(part.shape), list(part.shape)
        if self.dim is not None:
            if part.heads is None:
                span = balanced_split(part.shape[self.dim], size)[index]
            else:
                length, heads = part.shape[self.dim] // part.heads, heads_held(part.heads, index, size)
                span = range(heads.start * length, heads.stop * length)
            offsets[self.dim], shape[self.dim] = span.start, len(span)
        return TensorSlice(tuple(offsets), tuple(shape))

    def slices(self, index: int, size: int) -> tuple[tuple[Part, TensorSlice], ...]:
        """Return each part with its slice on rank `index`, in the order of the parameter's dim 0."""
        return tuple((part, self.slice_of(part, index, size)) for part in self.parts)

    def is_shared(self, part: Part, size: int) -> bool:
        """Return whether several ranks hold the same slice of a sharded `part`: it has fewer heads than ranks."""
        return self.dim is not None and part.heads is not None and part.heads < size

    def first_holder(self, part: Part, index: int, size: int) -> int:
        """Return the first of the ranks that hold the same slice of `part` as rank `index`."""
        if self.dim is None:
            return 0
        holders = size // part.heads if part.heads is not None and part.heads < size else 1
        return index // holders * holders

    def local_shape(self, index: int, size: int) -> tuple[int, ...]:
        """Return the shape of the registered parameter on rank `index` of `size`."""
        shapes = [region.shape for _, region in self.slices(index, size)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
