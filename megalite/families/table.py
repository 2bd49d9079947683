"""Which tensor of each family's Hugging Face folder is which of ours, and how tensor parallelism cuts it: as a page."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from megalite.families.family import Family
from megalite.families.fields import EXPERT_SETTINGS
from megalite.families.tensors import FamilyTensor, InterleavedExperts, StackedExperts
from megalite.families.words import Shared
from megalite.topology.experts import EXPERT_AXIS, ExpertShape, LatentAttention, MixtureShape
from megalite.topology.parameters import canonical_tensors, model_parameters
from megalite.topology.shape import ModelShape
from megalite.topology.sharding import Part, ShardSpec

_QUERY_HEADS, _SHARED_HEADS, _HEAD_DIM, _EXPERTS = 11, 5, 7, 13
_LATENT = LatentAttention(17, qk_nope_head_dim=23, qk_rope_head_dim=4, v_head_dim=29, q_lora_rank=19)
_SIZES = {
    1009: "V",
    101: "H",
    211: "F",
    307: "P",
    223: "M",
    _EXPERTS: "E",
    _QUERY_HEADS: "N",
    _HEAD_DIM: "D",
    _QUERY_HEADS * _HEAD_DIM: "N D",
    _SHARED_HEADS * _HEAD_DIM: "K D",
    227: "S",
    17: "C",
    17 + 4: "(C + R)",
    19: "Q",
    _QUERY_HEADS * (23 + 4): "N (U + R)",
    _QUERY_HEADS * (23 + 29): "N (U + W)",
    _QUERY_HEADS * 29: "N W",
}
# Fields that leave tensors out of a folder, with the value that does.
_OPTIONAL = {
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
}
_OF_EXPERTS = frozenset(EXPERT_SETTINGS.values())
_PREAMBLE = """# Hugging Face folders, tensor by tensor

Written by `megalite convert families` from the tables that import and export use; a test keeps it so.

Sizes: V vocabulary, H hidden, F intermediate, P positions, N query heads and K key-value heads of D each, E experts
of M (moe_intermediate_size), S shared_intermediate_size; of latent attention C kv_lora_rank, Q q_lora_rank,
U qk_nope_head_dim, R qk_rope_head_dim, W v_head_dim. `*` is the layer or the expert. *theirs* is a tensor of a Hugging
Face folder, *ours* the same tensor in megalite. Several of ours may be stacked along the rows of one of theirs; each is
cut on its own. *cut* is the slice of ours that a tensor-parallel rank holds. Our rows are a projection's outputs, so a
transposed tensor of theirs is cut by columns where ours is cut by rows. If there are more ranks than key-value heads,
several ranks hold the same head. Sizes that the ranks do not divide are cut unevenly, and never padded. Whole experts
are divided over the expert-parallel ranks, and each is cut over the ranks that share it.

Folders that transformers writes with `save_original_format=False` hold a layer's experts in two tensors,
`mlp.experts.gate_up_proj` [E, 2 M, H] and `mlp.experts.down_proj` [E, H, M]; they are read too.

gpt-oss is published with its experts in MXFP4, as `_blocks` and `_scales`, which are read as bf16; exports have the
tensors below in bf16 or float32, and no quantization_config.
"""


def family_page(families: Iterable[Family]) -> str:
    """Return the page, in Markdown."""
    return "\n".join([_PREAMBLE, *(line for family in families for line in _section(family))])


def _section(family: Family) -> Iterator[str]:
    shape = _shape(family)
    yield f"## {family.architecture.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}"
    yield ""
    yield f"`model_type` {family.model_type}, `{family.architecture}`. {_said(family)}"
    yield ""
    yield "| theirs | shape | ours | cut | present |"
    yield "|---|---|---|---|---|"
    shapes = list(_forms(shape))
    cuts = {part.name: (part, spec) for each in shapes for spec in _specs(each) for part in spec.parts}
    canonical = {name: size for each in shapes for name, size in canonical_tensors(each).items()}
    conditions = dict(_conditions(shape, family))
    shown = set[str]()
    for tensor in chain.from_iterable(family.tensors(each) for each in shapes):
        theirs, ours = _pattern(tensor.name), [*dict.fromkeys(map(_pattern, tensor.parts))]
        if theirs in shown:
            continue
        shown.add(theirs)
        same = "the same" if ours == [theirs] else f"`{_stacked(ours)}`"
        cut = dict.fromkeys(_cut(*cuts[part]) for part in tensor.parts)
        columns = (
            f"`{theirs}`",
            _shape_text(tensor, canonical),
            same + _form(tensor),
            "; ".join(cut),
            conditions.get(tensor.name, "always"),
        )
        yield f"| {' | '.join(columns)} |"
    yield ""


def _shape(family: Family) -> ModelShape:
    """One layer with all the tensors that the family may have, its sizes all different; of a mixture's layers two."""
    size = {name: number for number, name in _SIZES.items()}
    optional = {name: not without for name, without in _OPTIONAL.items() if name in family.free}
    dense = ModelShape(
        vocab_size=size["V"],
        hidden_size=size["H"],
        intermediate_size=size["F"],
        num_hidden_layers=1,
        num_attention_heads=_QUERY_HEADS,
        num_key_value_heads=_SHARED_HEADS if "num_key_value_heads" in family.free else _QUERY_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=size["P"],
        family=family.model_type,
        **{name: family.defaults[name] for name in family.defaults if name not in _OF_EXPERTS} | optional,
    )
    if "num_experts" not in family.free:
        return dense
    own = "moe_intermediate_size" in family.keys
    shared = size["S"] if "shared_intermediate_size" in family.free else 0
    fixed = {name: family.fixed[word] for name, word in EXPERT_SETTINGS.items() if word in family.fixed}
    corrected = family.defaults.get("router_correction_bias", False)
    experts = ExpertShape(
        *(_EXPERTS, 1, size["M" if own else "F"], shared),
        **{"correction_bias": corrected, "mlp_only_layers": (1,) * own, **fixed},
    )
    mixture = MixtureShape(**vars(replace(dense, num_hidden_layers=2)), experts=experts)
    if "kv_lora_rank" not in family.free:
        return mixture
    return replace(mixture, latent=_LATENT, head_dim=_LATENT.qk_head_dim)


def _forms(shape: ModelShape) -> Iterator[ModelShape]:
    """Yield the shape, and the one without a vector for queries where the family may have none."""
    yield shape
    if isinstance(shape, MixtureShape) and shape.latent is not None:
        yield replace(shape, latent=replace(shape.latent, q_lora_rank=None))


def _said(family: Family) -> str:
    fixed, unset = (
        ", ".join(f"{name} = {value}" for name, value in fields.items())
        for fields in (family.fixed, family.unset)
    )
    refused = ", ".join(
        f"`{key}` other than {' or '.join(map(_value_text, allowed))}"
        for key, allowed in family.required.items()
    )
    sentences = [
        f"Fixed: {fixed}." if fixed else "",
        f"Default: {unset}." if unset else "",
        f"Refused: {refused}." if refused else "",
    ]
    return " ".join(filter(None, sentences))


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value)


def _specs(shape: ModelShape) -> list[ShardSpec]:
    return [parameter.spec for parameter in model_parameters(shape)]


def _conditions(shape: ModelShape, family: Family) -> Iterator[tuple[str, str]]:
    [with_rank, *others] = ({tensor.name for tensor in family.tensors(each)} for each in _forms(shape))
    for other in others:
        yield from ((name, "`q_lora_rank`") for name in with_rank - other)
        yield from ((name, "no `q_lora_rank`") for name in other - with_rank)
    keys = {name: words.key for words in family.words if isinstance(words, Shared) for name in words.fields}
    for name, without in _OPTIONAL.items():
        if name in family.free:
            change: dict[str, Any] = {name: without}
            left = {tensor.name for tensor in family.tensors(replace(shape, **change))}
            there = f"`{keys[name]}`" if name in keys else "untied"
            yield from ((tensor.name, there) for tensor in family.tensors(shape) if tensor.name not in left)
    if "moe_intermediate_size" in family.keys:
        for tensor in family.tensors(shape):
            if ".mlp." in tensor.name:
                first = tensor.name.startswith(f"{family.names.layers}.0.")
                yield tensor.name, "layers with experts" if first else "other layers"


def _cut(part: Part, spec: ShardSpec) -> str:
    if spec.dim is None:
        return "whole on every rank"
    if part.heads is not None:
        return f"rows, by {'query' if part.heads == _QUERY_HEADS else 'key-value'} heads"
    along = "rows" if spec.dim == 0 else "columns"
    return f"{along}, of each expert" if spec.axis == EXPERT_AXIS else along


def _form(tensor: FamilyTensor) -> str:
    if isinstance(tensor, InterleavedExperts):
        turns = ", in turns" if tensor.alternating > 1 else ""
        return (", transposed" if len(tensor.shape) == 3 else "") + turns
    return (", transposed" if tensor.transposed else "") + (", by head" if tensor.groups > 1 else "")


def _shape_text(tensor: FamilyTensor, canonical: Mapping[str, tuple[int, ...]]) -> str:
    if isinstance(tensor, InterleavedExperts):
        height, *columns = (_SIZES[size] for size in canonical[tensor.parts[0]])
        several = f"{tensor.alternating} {height}" if tensor.alternating > 1 else height
        return " x ".join(("E", *columns, several))
    parts = tensor.of_expert(0) if isinstance(tensor, StackedExperts) else tensor.parts
    rows = Counter(_SIZES[canonical[part][0]] for part in parts)
    summed = " + ".join(size if count == 1 else f"{count} {size}" for size, count in rows.items())
    sizes = [
        *(["E"] if isinstance(tensor, StackedExperts) else []),
        f"({summed})" if len(rows) > 1 else summed,
        *(_SIZES[size] for size in canonical[tensor.parts[0]][1:]),
    ]
    return " x ".join(reversed(sizes) if tensor.transposed else sizes)


def _stacked(names: list[str]) -> str:
    """mlp.gate_proj.weight, mlp.up_proj.weight -> mlp.{gate, up}_proj.weight."""
    if len(names) == 1:
        return names[0]
    block, _, kind = names[0].rsplit(".", 2)
    modules = list(dict.fromkeys(name.rsplit(".", 2)[1].removesuffix("_proj") for name in names))
    return f"{block}.{{{', '.join(modules)}}}_proj.{kind}" if modules[1:] else names[0]


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
