"""Rules over multi-head latent attention: its sizes, and the settings that mean something else in other attention."""

from collections.abc import Iterator

from megalite.config.sections.adapter_section import described_adapter
from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.shape_settings import model_shape
from megalite.config.sections.toml import shown
from megalite.errors import Problem
from megalite.families.fields import LATENT_SETTINGS
from megalite.topology.adapter import Lora, Prefix

_RANK = "model.kv_lora_rank"


def sizes_belong_to_latent_attention(run: CheckedRun) -> Iterator[Problem]:
    if run.model.kv_lora_rank is not None:
        return
    for name in LATENT_SETTINGS:
        if getattr(run.model, name) is not None:
            message = f"has no effect without {_RANK}"
            yield Problem.reset(f"model.{name}", message, f"set {_RANK}, or delete the setting")


def latent_attention_has_its_sizes(run: CheckedRun) -> Iterator[Problem]:
    rank = run.model.kv_lora_rank
    for name, usual in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128)):
        if rank is not None and getattr(run.model, name) is None:
            message = f"is required with {_RANK} = {rank}"
            yield Problem.reset(f"model.{name}", message, f"set it, as in {usual}", usual)


def latent_heads_have_one_width(run: CheckedRun) -> Iterator[Problem]:
    model, heads = run.model, run.model.num_attention_heads
    if model.kv_lora_rank is None or None in (model.qk_nope_head_dim, model.qk_rope_head_dim):
        return
    nope, rope = model.qk_nope_head_dim, model.qk_rope_head_dim
    parts = f"model.qk_nope_head_dim + model.qk_rope_head_dim = {nope + rope}"
    if rope % 2:
        message = f"{rope} is odd, but rotary embeddings rotate pairs"
        yield Problem.reset("model.qk_rope_head_dim", message, f"use {rope + 1}", rope + 1)
    if model.head_dim not in (None, nope + rope):
        message = f"{model.head_dim} is not {parts}"
        yield Problem.reset("model.head_dim", message, "delete the setting")
    if model.v_head_dim is not None and model.v_head_dim > nope + rope:
        message = f"{model.v_head_dim} is more than {parts}: values are kept in the width of keys"
        yield Problem.reset("model.v_head_dim", message, f"use at most {nope + rope}", nope + rope)
    if model.num_key_value_heads not in (None, heads):
        message = (
            f"{model.num_key_value_heads} does not work with {_RANK}: each of the {heads} heads has its own "
        )
        message += "key and value, made of one vector"
        yield Problem.reset("model.num_key_value_heads", message, "delete the setting")


def latent_attention_has_its_own_norms_and_rotation(run: CheckedRun) -> Iterator[Problem]:
    shape = model_shape(run.model, 1)
    for name, built in (("qk_norm", None), ("partial_rotary_factor", 1.0)):
        value = getattr(shape, name)
        if run.model.kv_lora_rank is not None and value != built:
            message = f"{shown(value)} does not work with {_RANK}: its vectors have norms, and "
            message += "model.qk_rope_head_dim says what is rotated"
            yield Problem.reset(
                f"model.{name}", message, "delete the setting, or choose another model.family"
            )


def adapters_suit_latent_attention(run: CheckedRun) -> Iterator[Problem]:
    adapter = described_adapter(run.adapter)
    if run.model.kv_lora_rank is None:
        return
    if isinstance(adapter, Prefix):
        message = f'"prefix" does not work with {_RANK}: its keys and values are made of one vector'
        yield Problem.reset("adapter.kind", message, 'use "lora"', "lora")
    elif isinstance(adapter, Lora) and run.adapter.dropout:
        message = f"{run.adapter.dropout} does not work with {_RANK}: adapters of its vectors have no dropout"
        yield Problem.reset("adapter.dropout", message, "use 0.0", 0.0)
