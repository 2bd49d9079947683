"""The tensors of a family's Hugging Face folder, each made of canonical tensors: renamed, fused, transposed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

_LAYERS = "model.layers"


@dataclass(frozen=True)
class FamilyTensor:
    """One tensor of a Hugging Face folder: canonical tensors along dim 0, then transposed or not.

    groups: 1: the parts follow each other whole. n: dim 0 is n groups, each with the n-th part of every canonical
    tensor in turn (GPT-NeoX: query, key and value of one head after the other).
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    transposed: bool = False
    groups: int = 1

    def slices(
        self, part: str, region: TensorSlice, canonical: Mapping[str, tuple[int, ...]]
    ) -> Iterator[TensorSlice]:
        """Return where a region of one part stands, in order along dim 0, before the transposition."""
        rows = {name: canonical[name][0] // self.groups for name in self.parts}
        group_rows, own = sum(rows.values()), rows[part]
        before = sum(rows[name] for name in self.parts[: self.parts.index(part)])
        first, last = region.offsets[0], region.offsets[0] + region.shape[0]
        while first < last:
            group, within = divmod(first, own)
            count = min(own - within, last - first)
            offset = group * group_rows + before + within
            yield TensorSlice((offset, *region.offsets[1:]), (count, *region.shape[1:]))
            first += count


@dataclass(frozen=True)
class Fused:
    """Projections of a layer that stand in one tensor; `by_head`: interleaved, one key-value head after the other."""

    name: str
    modules: tuple[str, ...]
    by_head: bool = False


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class TensorNames:
    """How a family's names differ from the canonical ones, which are Llama's.

    modules: canonical module -> the family's, within a layer ("mlp.up_proj") or outside of it ("model.norm",
    "lm_head"; "model.layers": what stands before the index of a layer).
    fusions: canonical modules that stand in one tensor.
    conv1d: matrices within layers are stored as [in, out].
    optional_prefix: what the names in some published files lack.
    in_models: name in files -> name of the parameter in a model of transformers 5, where they differ.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    fusions: tuple[Fused, ...] = ()
    conv1d: bool = False
    optional_prefix: str = ""
    in_models: Mapping[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> str:
        """The name before the index of a layer."""
        return self.modules.get(_LAYERS, _LAYERS)

    def of(self, name: str) -> str:
        """Return the family's name of a canonical tensor outside of the layers."""
        module, kind = name.rsplit(".", 1)
        return f"{self.modules.get(module, module)}.{kind}"

    def tensors(self, shape: ModelShape) -> Iterator[FamilyTensor]:
        """Return every tensor of the folder, in forward order; each canonical tensor stands in exactly one."""
        canonical = canonical_tensors(shape)
        first = {fused.modules[0]: fused for fused in self.fusions}
        later = {module for fused in self.fusions for module in fused.modules[1:]}
        for name, size in canonical.items():
            if not name.startswith(f"{_LAYERS}."):
                yield FamilyTensor(self.of(name), size, (name,))
                continue
            layer, module, kind = _within_layer(name)
            if module in later:
                continue
            fused = first.get(module, Fused(self.modules.get(module, module), (module,)))
            parts = tuple(f"{_LAYERS}.{layer}.{part}.{kind}" for part in fused.modules)
            stacked = (sum(canonical[part][0] for part in parts), *size[1:])
            transposed = self.conv1d and len(size) == 2
            yield FamilyTensor(
                f"{self.layers}.{layer}.{fused.name}.{kind}",
                stacked[::-1] if transposed else stacked,
                parts,
                transposed,
                shape.num_key_value_heads if fused.by_head else 1,
            )


def _within_layer(name: str) -> tuple[str, str, str]:
    """model.layers.3.mlp.up_proj.weight -> ("3", "mlp.up_proj", "weight")."""
    layer, rest = name.removeprefix(f"{_LAYERS}.").split(".", 1)
    module, kind = rest.rsplit(".", 1)
    return layer, module, kind
