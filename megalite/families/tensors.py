"""Each family's Hugging Face tensors as a table: which canonical tensors stand in which of theirs, and how."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megalite.topology.parameters import EMBEDDING, FINAL_NORM, POSITIONS, canonical_tensors
from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class FamilyTensor:
    """One tensor of a Hugging Face folder: canonical tensors stacked along dim 0, then perhaps transposed."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    transposed: bool = False


def family_tensors(shape: ModelShape) -> tuple[FamilyTensor, ...]:
    """Every tensor of the family's folder, in forward order; each canonical tensor stands in exactly one."""
    canonical = canonical_tensors(shape)
    if shape.family == "gpt2":
        return tuple(_gpt2(shape, canonical))
    return tuple(_in_our_names(canonical, _STACKED.get(shape.family, {})))


# Our modules within a layer that stand in one of theirs: the first -> its name there, and all of them.
_Stacks = Mapping[str, tuple[str, tuple[str, ...]]]
_STACKED: Mapping[str, _Stacks] = {
    "phi3": {
        "self_attn.q_proj": (
            "self_attn.qkv_proj",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ),
        "mlp.gate_proj": ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    }
}


def _in_our_names(canonical: dict[str, tuple[int, ...]], stacks: _Stacks) -> Iterator[FamilyTensor]:
    later = {part for _, parts in stacks.values() for part in parts[1:]}
    for name, size in canonical.items():
        if not name.startswith("model.layers."):
            yield FamilyTensor(name, size, (name,))
            continue
        _, module, _ = _within_layer(name)
        if module in later:
            continue
        theirs, modules = stacks.get(module, (module, (module,)))
        parts = tuple(name.replace(module, part) for part in modules)
        rows = sum(canonical[part][0] for part in parts)
        yield FamilyTensor(name.replace(module, theirs), (rows, *size[1:]), parts)


_GPT2_OUTSIDE = {
    EMBEDDING: "transformer.wte.weight",
    POSITIONS: "transformer.wpe.weight",
    FINAL_NORM: "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
    "lm_head.weight": "lm_head.weight",
}
# Our module within a layer -> theirs. Their linears are Conv1D: stored [in, out].
_GPT2_INSIDE = {
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def _gpt2(shape: ModelShape, canonical: dict[str, tuple[int, ...]]) -> Iterator[FamilyTensor]:
    for name, size in canonical.items():
        if name in _GPT2_OUTSIDE:
            yield FamilyTensor(_GPT2_OUTSIDE[name], size, (name,))
            continue
        layer, module, kind = _within_layer(name)
        if module not in _GPT2_INSIDE:
            continue  # key and value stand in the tensor of query
        parts: tuple[str, ...] = (name,)
        if module == "self_attn.q_proj":
            parts = tuple(name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj"))
        rows = sum(canonical[part][0] for part in parts)
        theirs = f"transformer.h.{layer}.{_GPT2_INSIDE[module]}.{kind}"
        if len(size) == 2:
            yield FamilyTensor(theirs, (size[1], rows), parts, transposed=True)
        else:
            yield FamilyTensor(theirs, (rows,), parts)


def _within_layer(name: str) -> tuple[str, str, str]:
    """model.layers.3.mlp.up_proj.weight -> ("3", "mlp.up_proj", "weight")."""
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    module, kind = rest.rsplit(".", 1)
    return layer, module, kind
