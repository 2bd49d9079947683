"""The names under which FSDP2 users and torchtitan save a model and its optimizer, found by what they end in.

torchtitan names a Llama's parameters as Meta does (torchtitan/models/llama3/state_dict_adapter.py).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from megalite.errors import CheckpointError, listed
from megalite.families.registry import FAMILIES
from megalite.families.tensors import FamilyTensor
from megalite.topology.parameters import EMBEDDING, FINAL_NORM, HEAD
from megalite.topology.shape import ModelShape

_TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Names of 2026: its query, key and value stand in a module of their own, and the head is called as elsewhere.
_TITAN_LATER = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "lm_head": "lm_head",
}
_TITAN_FUSED = ".attention.qkv_linear.wqkv."
_TITAN_EMBEDDING = "tok_embeddings.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(\w+)")
_INTERLEAVED = ("self_attn.q_proj.", "self_attn.k_proj.")


@dataclass(frozen=True)
class StoredNames:
    """Where the tensors of a model stand. model: the prefix of weights. moments: that of a parameter's state, or None.

    titan: module -> torchtitan's name of it, None for Hugging Face's names; with torchtitan's, the rows of query and
    key are those of a rotary embedding of neighbouring pairs. in_models: name in files -> name in transformers' model.
    """

    model: str
    moments: str | None
    titan: Mapping[str, str] | None
    in_models: dict[str, str]

    def of(self, tensor: FamilyTensor) -> str:
        """Return the name of a tensor in the program's own model, without a prefix."""
        return self._named(tensor.name)

    def weight(self, tensor: FamilyTensor) -> str:
        return self.model + self.of(tensor)

    def head(self, shape: ModelShape) -> str:
        """Return the name of the head, which a model with tied weights may have too."""
        return self.model + self._named(FAMILIES[shape.family].names.of(HEAD))

    def _named(self, name: str) -> str:
        return self.in_models.get(name, name) if self.titan is None else titan_name(name, self.titan)

    def state(self, tensor: FamilyTensor, key: str) -> str:
        return f"{self.moments}{self.of(tensor)}.{key}"

    def heads(self, tensor: FamilyTensor, shape: ModelShape) -> int | None:
        """Return how many heads' rows have to be reordered; None if the rows stand as here."""
        if self.titan is None or not any(part in tensor.name for part in _INTERLEAVED):
            return None
        return shape.num_attention_heads if ".q_proj." in tensor.name else shape.num_key_value_heads


def titan_name(name: str, modules: Mapping[str, str] = _TITAN) -> str:
    """Return torchtitan's name of a Llama tensor of Hugging Face; raises KeyError if it has no such tensor."""
    if (match := _LAYER.fullmatch(name)) is not None:
        return f"layers.{match[1]}.{modules[match[2]]}.{match[3]}"
    module, kind = name.rsplit(".", 1)
    return f"{modules[module]}.{kind}"


def is_titan(names: Iterable[str]) -> bool:
    return any(_ends_with(name, _TITAN_EMBEDDING) for name in names)


def find_names(names: Collection[str], shape: ModelShape, source: object) -> StoredNames:
    """Find a model of this shape among the tensors of a checkpoint, and its state of AdamW.

    Raises CheckpointError if there is no such model, more than one, or another optimizer's state.
    """
    family, titan = FAMILIES[shape.family].names, is_titan(names)
    if titan and shape.family != "llama":
        raise CheckpointError(
            f"{source} has torchtitan's names; of its models only Llama is supported, but config.json describes a"
            f" {shape.family}: export the model to Hugging Face's format with torchtitan"
        )
    stored = (
        {}
        if titan
        else {old: new for old, new in family.in_models.items() if any(_ends_with(x, new) for x in names)}
    )
    anchor = _TITAN_EMBEDDING if titan else family.of(FINAL_NORM)
    anchor = stored.get(anchor, anchor)
    prefixes = sorted(name.removesuffix(anchor) for name in names if _ends_with(name, anchor))
    if not prefixes:
        example = family.of(EMBEDDING)
        raise CheckpointError(
            f"{source} has no tensor that ends in {anchor}: it holds no {shape.family} under Hugging Face's names"
            f" ({example}), nor a Llama under torchtitan's ({_TITAN_EMBEDDING})"
        )
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{source} has several models, at {listed([prefix + anchor for prefix in prefixes])}; save one of them"
        )
    modules = _titan_modules(names, source) if titan else None
    return StoredNames(prefixes[0], _moments(names, anchor, source), modules, stored)


def _titan_modules(names: Collection[str], source: object) -> dict[str, str]:
    """Return module -> torchtitan's name, as its version had it. Raises CheckpointError for fused projections."""
    fused = next((name for name in names if _TITAN_FUSED in name), None)
    if fused is not None:
        raise CheckpointError(
            f"{source} has {fused}, query, key and value in one tensor, which is not supported; export the model to"
            " Hugging Face's format with torchtitan"
        )
    later = {
        module: name for module, name in _TITAN_LATER.items() if any(f"{name}." in stored for stored in names)
    }
    return _TITAN | later


def _moments(names: Collection[str], anchor: str, source: object) -> str | None:
    ending = f"{anchor}.exp_avg"
    prefixes = sorted(name.removesuffix(ending) for name in names if _ends_with(name, ending))
    if len(prefixes) > 1:
        raise CheckpointError(f"{source} has several optimizers, at {listed(prefixes)}; save one of them")
    if prefixes:
        return prefixes[0]
    if numbered := sorted(name for name in names if re.search(r"(^|\.)state\.\d+\.\w+$", name)):
        raise CheckpointError(
            f"{source} numbers the parameters in its optimizer state ({numbered[0]}); save it by name, with"
            " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    states = {name.rpartition(".")[2] for name in names if _ends_with(name.rpartition(".")[0], anchor)}
    if states:
        raise CheckpointError(
            f"{source} has {', '.join(sorted(states))} of {anchor}, which is not AdamW's state; save the model alone to"
            " import its weights"
        )
    return None


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
