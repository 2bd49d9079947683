"""GPT-NeoX's and Megatron-DeepSpeed's names as a table: where each canonical tensor is, how ranks cut it. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megalite.topology.parameters import EMBEDDING, FINAL_NORM, HEAD, POSITIONS, canonical_tensors
from megalite.topology.shape import ModelShape

Role = int | Literal["embedding", "final_norm", "head"]
"""A decoder layer's global index, or a pipeline layer outside of them."""
Cut = Literal["rows", "columns", "copies", "terms"]
"""How model-parallel ranks hold a tensor: its shards along dim 0 or dim 1, the whole, or a term of a sum."""

DECODER_LAYER = -1
_FINAL_NORM_BIAS = FINAL_NORM.replace("weight", "bias")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class Dialect:
    """How a program names and cuts tensors.

    attention, up, down: modules within a decoder layer. gate: the same; None: the rows of a gate stand in `up`, before
    those of the up projection if gate_first. norm_weight: a norm's weight. final_norm: what stands before its name.
    qkv: how each rank's query, key and value rows are interleaved. "group": the queries of a key-value head, its key,
    its value. "head": a query head, then as large a fraction of the keys, of the values. None: not at all.
    output_biases: how ranks hold the biases of row-parallel linears.
    """

    program: str
    attention: str
    up: str
    down: str
    head: str
    norm_weight: str = "weight"
    final_norm: str = ""
    gate: str | None = None
    gate_first: bool = True
    qkv: Literal["group", "head"] | None = "group"
    output_biases: Cut = "copies"


@dataclass(frozen=True)
class LayerTensor:
    """Where the files hold a canonical tensor: the pipeline layer, the name in it, and how ranks cut it.

    shape: of the canonical tensor. parts: rows of each canonical tensor that is fused into the stored one, in order;
    index: which of them it is. groups: the stored tensor consists of as many groups of rows, each with its fraction of
    every part; 0: one group on each rank.
    """

    role: Role
    name: str
    cut: Cut
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    index: int = 0
    groups: int = 0

    def rank_shape(self, ranks: int) -> tuple[int, ...] | None:
        """Return the shape of one of `ranks` model-parallel ranks' tensors; None where they cannot cut it."""
        rows, others = sum(self.parts), self.shape[1:]
        if self.cut == "columns":
            return None if others[0] % ranks else (rows, others[0] // ranks)
        if self.cut != "rows":
            return (rows, *others)
        groups = self.groups or ranks
        cuttable = groups % ranks == 0 and all(part % groups == 0 for part in self.parts)
        return (rows // ranks, *others) if cuttable else None


def stored_tensors(shape: ModelShape, dialect: Dialect) -> dict[str, LayerTensor]:
    """Return where the files of a program have each canonical tensor of a model."""
    canonical = canonical_tensors(shape)
    outside: dict[str, tuple[Role, str, Cut]] = {
        EMBEDDING: ("embedding", "word_embeddings.weight", "rows"),
        POSITIONS: ("embedding", "position_embeddings.weight", "copies"),
        FINAL_NORM: ("final_norm", dialect.final_norm + dialect.norm_weight, "copies"),
        _FINAL_NORM_BIAS: ("final_norm", f"{dialect.final_norm}bias", "copies"),
        HEAD: ("head", dialect.head, "rows"),
    }
    stored = {}
    for name, size in canonical.items():
        if name in outside:
            role, theirs, cut = outside[name]
            stored[name] = LayerTensor(role, theirs, cut, size, size[:1])
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        fused = _fused_with(module, shape, dialect)
        siblings = [f"model.layers.{layer}.{part}.{kind}" for part in fused]
        theirs, cut = _within_layer(module, kind, dialect)
        stored[name] = LayerTensor(
            int(layer),
            theirs,
            cut,
            size,
            tuple(canonical[part][0] for part in siblings),
            siblings.index(name),
            _groups(shape, dialect) if module in _QKV else 0,
        )
    return stored


def _fused_with(module: str, shape: ModelShape, dialect: Dialect) -> tuple[str, ...]:
    """Return the modules of the stored tensor that has a module's rows, in order."""
    if module in _QKV:
        return _QKV
    if module in _GATED and shape.gated_mlp and dialect.gate is None:
        return _GATED if dialect.gate_first else _GATED[::-1]
    return (module,)


def _groups(shape: ModelShape, dialect: Dialect) -> int:
    of = {"group": shape.num_key_value_heads, "head": shape.num_attention_heads}
    return of[dialect.qkv] if dialect.qkv else 0


def _within_layer(module: str, kind: str, dialect: Dialect) -> tuple[str, Cut]:
    """Return the stored name and the cut of a module of a decoder layer. kind: weight or bias."""
    if module.endswith("layernorm"):
        return f"{module}.{dialect.norm_weight if kind == 'weight' else kind}", "copies"
    if module in _QKV:
        return f"{dialect.attention}.query_key_value.{kind}", "rows"
    outputs = {"self_attn.o_proj": f"{dialect.attention}.dense", "mlp.down_proj": dialect.down}
    if module in outputs:
        return f"{outputs[module]}.{kind}", "columns" if kind == "weight" else dialect.output_biases
    gate = dialect.gate if module == "mlp.gate_proj" else None
    return f"{gate or dialect.up}.{kind}", "rows"


def role_of(names: set[str], dialect: Dialect) -> Role | None:
    """Return the role of a pipeline layer by its tensors' names: DECODER_LAYER without its index; None: unknown."""
    if "word_embeddings.weight" in names:
        return "embedding"
    if dialect.head in names:
        return "head"
    if any(name.startswith(f"{dialect.attention}.") for name in names):
        return DECODER_LAYER
    return "final_norm" if dialect.final_norm + dialect.norm_weight in names else None


def is_ignored(name: str) -> bool:
    """Whether a tensor is a buffer that follows from the arguments: rotary frequencies, masks, amax histories."""
    return name.endswith((".inv_freq", "._extra_state", ".masked_bias"))


def missing_layers(roles: Mapping[Role, int], shape: ModelShape) -> Iterator[str]:
    """Yield the pipeline layers that a model has and a checkpoint lacks."""
    needed: list[Role] = ["embedding", *range(shape.num_hidden_layers), "final_norm"]
    needed += [] if shape.tie_word_embeddings else ["head"]
    for role in needed:
        if role not in roles:
            yield f"decoder layer {role}" if isinstance(role, int) else f"the {role.replace('_', ' ')}"
