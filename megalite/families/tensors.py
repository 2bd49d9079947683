"""The tensors of a family's Hugging Face folder, each made of canonical tensors: renamed, fused, transposed."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from megalite.topology.experts import MixtureShape
from megalite.topology.parameters import canonical_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import TensorSlice

_LAYERS = "model.layers"
STACKED = ".experts.gate_up_proj"
"""The end of the name of a tensor that holds a layer's experts."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_INDEX = re.compile(r"\.\d+\.")


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

    def part_from(self, part: str, values: Any) -> Any:
        """Return a region of one part from the tensor of its `slices`, one after another and transposed back."""
        return values


@dataclass(frozen=True)
class StackedExperts(FamilyTensor):
    """The matrices of all experts of a layer [experts, rows, columns]; those of one expert follow each other.

    parts: those of the first expert, then of the next one.
    """

    def slices(
        self, part: str, region: TensorSlice, canonical: Mapping[str, tuple[int, ...]]
    ) -> Iterator[TensorSlice]:
        """Return where a region of one part stands: one expert's rows."""
        expert, place = divmod(self.parts.index(part), len(self.of_expert(0)))
        before = sum(canonical[name][0] for name in self.of_expert(expert)[:place])
        yield TensorSlice((expert, before + region.offsets[0], region.offsets[1]), (1, *region.shape))

    def of_expert(self, expert: int) -> tuple[str, ...]:
        """Return the parts of one expert."""
        number = len(self.parts) // self.shape[0]
        return self.parts[expert * number :][:number]

    def part_from(self, part: str, values: Any) -> Any:
        return values.squeeze(0)


@dataclass(frozen=True)
class InterleavedExperts(FamilyTensor):
    """All experts' matrices of a layer, transposed [experts, columns, n * rows], or their biases [experts, n * rows].

    The n parts of an expert alternate, row by row (gpt-oss' gate and up). parts: those of the first expert, then of the
    next one.
    """

    @property
    def alternating(self) -> int:
        """n, the parts of each expert."""
        return len(self.parts) // self.shape[0]

    def slices(
        self, part: str, region: TensorSlice, canonical: Mapping[str, tuple[int, ...]]
    ) -> Iterator[TensorSlice]:
        """Return where a region of one part stands, with the same rows of the expert's other parts."""
        number, expert = self.alternating, self.parts.index(part) // self.alternating
        offsets, sizes = region.offsets[::-1], region.shape[::-1]
        yield TensorSlice((expert, *offsets[:-1], number * offsets[-1]), (1, *sizes[:-1], number * sizes[-1]))

    def part_from(self, part: str, values: Any) -> Any:
        number = self.alternating
        own = values.squeeze(0)[..., self.parts.index(part) % number :: number]
        return own.t() if own.dim() == 2 else own

    def of_expert(self, expert: int) -> "InterleavedExperts":
        """Return the tensor of one expert alone."""
        own = self.parts[expert * self.alternating : (expert + 1) * self.alternating]
        return replace(self, shape=(1, *self.shape[1:]), parts=own)


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

    modules: canonical module -> the family's, within a layer ("mlp.up_proj", "mlp.experts.*.up_proj" of any expert) or
    outside of it ("model.norm", "lm_head"; "model.layers": what stands before the index of a layer). With
    "mlp.experts.gate_up_proj" and "mlp.experts.down_proj" a layer's experts are two tensors of these names.
    fusions: canonical modules that stand in one tensor.
    conv1d: matrices within layers are stored as [in, out].
    interleaved: a layer's experts stand in two tensors and their biases in two (gpt-oss): see InterleavedExperts.
    optional_prefix: what the names in some published files lack.
    in_models: name in files -> name of the parameter in a model of transformers 5, where they differ.
    in_mixtures: as `modules`, in a mixture of transformers 5, of its MLPs whose names are not the canonical ones.
    further: a tensor that files may have in layers behind the last, which predict further tokens; no model here has
    those layers.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    fusions: tuple[Fused, ...] = ()
    conv1d: bool = False
    interleaved: bool = False
    optional_prefix: str = ""
    in_models: Mapping[str, str] = field(default_factory=dict)
    in_mixtures: Mapping[str, str] = field(default_factory=dict)
    further: str = ""

    @property
    def layers(self) -> str:
        """The name before the index of a layer."""
        return self.modules.get(_LAYERS, _LAYERS)

    def of(self, name: str) -> str:
        """Return the family's name of a canonical tensor outside of the layers."""
        module, kind = name.rsplit(".", 1)
        return f"{self.modules.get(module, module)}.{kind}"

    def of_further_tokens(self, names: Collection[str], shape: ModelShape) -> Iterator[str]:
        """Yield those of a folder's tensors that stand in layers which predict further tokens."""
        layer = shape.num_hidden_layers
        while self.further and f"{self.layers}.{layer}.{self.further}" in names:
            yield from (name for name in names if name.startswith(f"{self.layers}.{layer}."))
            layer += 1

    def tensors(self, shape: ModelShape) -> Iterator[FamilyTensor]:
        """Return every tensor of the folder, in forward order; each canonical tensor stands in exactly one."""
        if f"mlp{STACKED}" in self.modules:
            return self._with_stacks(shape, self.modules)
        return self._unstacked(shape)

    def _unstacked(self, shape: ModelShape) -> Iterator[FamilyTensor]:
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
            if self.interleaved and module.startswith(_EXPERTS):
                assert isinstance(shape, MixtureShape) and shape.experts is not None
                if module in _FIRST_EXPERT:
                    yield _interleaved(name, size, shape.experts.num_experts, self.layers)
                continue
            fused = first.get(module, Fused(self._within(module), (module,)))
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

    def stacked(self, shape: ModelShape) -> Iterator[FamilyTensor]:
        """Return the tensors as a mixture of transformers 5 holds them, and as save_original_format=False writes them.

        A layer's experts are two tensors, and its MLP has its canonical names unless `in_mixtures` has others.
        """
        if self.interleaved:  # in files too
            return self._unstacked(shape)
        return self._with_stacks(shape, self.in_mixtures)

    def _with_stacks(self, shape: ModelShape, names: Mapping[str, str]) -> Iterator[FamilyTensor]:
        """Yield the tensors with two for the experts of a layer. names: of modules of MLPs, canonical by default."""
        canonical = canonical_tensors(shape)
        for of_experts, tensors in groupby(self._unstacked(shape), lambda tensor: _stack_of(tensor.parts[0])):
            if of_experts is None:
                for tensor in tensors:
                    own = ".mlp." in tensor.parts[0] and len(tensor.parts) == 1
                    yield replace(tensor, name=_renamed(tensor.parts[0], names)) if own else tensor
            else:
                parts = tuple(tensor.parts[0] for tensor in tensors)
                rows, columns = sum(canonical[part][0] for part in parts), canonical[parts[0]][1]
                experts = len({_EXPERT.sub(r"\2", part) for part in parts})
                stack = _renamed(f"{of_experts}.", names).removesuffix(".")
                yield StackedExperts(stack, (experts, rows // experts, columns), parts)

    def _within(self, module: str) -> str:
        """Return the family's name of a module within a layer."""
        expert = _INDEX.search(module)
        if expert is None:
            return self.modules.get(module, module)
        pattern = module.replace(expert.group(), ".*.")
        return self.modules.get(pattern, pattern).replace(".*.", expert.group())


_EXPERTS = "mlp.experts."
_FIRST_EXPERT = {"mlp.experts.0.gate_proj": ("gate", "up"), "mlp.experts.0.down_proj": ("down",)}


def _interleaved(first: str, size: tuple[int, ...], experts: int, layers: str) -> InterleavedExperts:
    """Return the tensor that begins with one of the first expert's. first, size: its canonical name and shape."""
    layer, module, kind = _within_layer(first)
    projections = _FIRST_EXPERT[module]
    block = f"{layer}.{_EXPERTS}"
    parts = tuple(
        f"{_LAYERS}.{block}{expert}.{each}_proj.{kind}" for expert in range(experts) for each in projections
    )
    stored = (*size[:0:-1], len(projections) * size[0])
    name = f"{layers}.{block}{'_'.join(projections)}_proj{'_bias' if kind == 'bias' else ''}"
    return InterleavedExperts(name, (experts, *stored), parts)


def _stack_of(name: str) -> str | None:
    """model.layers.0.mlp.experts.3.up_proj.weight -> model.layers.0.mlp.experts.gate_up_proj; None: no expert's."""
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return None
    return f"{expert[1]}.{'down_proj' if expert[3] == 'down' else 'gate_up_proj'}"


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """model.layers.0.mlp.gate.weight, {"mlp.gate": "moe.router"} -> model.layers.0.moe.router.weight."""
    layer, module, kind = _within_layer(name)
    return f"{_LAYERS}.{layer}.{names.get(module, module)}.{kind}"


def _within_layer(name: str) -> tuple[str, str, str]:
    """model.layers.3.mlp.up_proj.weight -> ("3", "mlp.up_proj", "weight")."""
    layer, rest = name.removeprefix(f"{_LAYERS}.").split(".", 1)
    module, kind = rest.rsplit(".", 1)
    return layer, module, kind
