"""Rules over multi-head latent attention."""

from typing import Any

from tests.unit.config.expert_cases import FOLDER
from tests.unit.config.rule_cases import Case
from tests.unit.config.runs import REMOVED

LATENT: dict[str, Any] = {
    "model.kv_lora_rank": 14,
    "model.q_lora_rank": 18,
    "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 5,
    "model.num_key_value_heads": REMOVED,
    "checkpoint.export": False,
}
# The folder's model has fewer key-value heads.
_ADAPTED = {"model__weights": FOLDER, "model__num_key_value_heads": 8}


def _case(rule: str, key: str, value: Any, said: str, cure: Any = REMOVED, **changes: Any) -> Case:
    """Return a case of one bad setting of a model with latent attention; cure: a good value."""
    base = {**LATENT, **{name.replace("__", "."): other for name, other in changes.items()}}
    return Case(rule, {**base, key: value}, f"{key}: {said}", {key: cure})


LATENT_CASES = [
    Case(
        "sizes_belong_to_latent_attention",
        {"model.q_lora_rank": 18},
        "model.q_lora_rank: has no effect without model.kv_lora_rank; set model.kv_lora_rank, or delete the setting",
        LATENT,
    ),
    _case(
        "latent_attention_has_its_sizes",
        "model.v_head_dim",
        REMOVED,
        "is required with model.kv_lora_rank = 14; set it, as in 128",
        5,
    ),
    _case(
        "latent_heads_have_one_width",
        "model.qk_rope_head_dim",
        3,
        "3 is odd, but rotary embeddings rotate pairs; use 4",
        4,
    ),
    _case(
        "latent_heads_have_one_width",
        "model.head_dim",
        6,
        "6 is not model.qk_nope_head_dim + model.qk_rope_head_dim = 10; delete the setting",
    ),
    _case(
        "latent_heads_have_one_width",
        "model.v_head_dim",
        12,
        "12 is more than model.qk_nope_head_dim + model.qk_rope_head_dim = 10: values are kept in the width of keys; "
        "use at most 10",
        10,
    ),
    _case(
        "latent_heads_have_one_width",
        "model.num_key_value_heads",
        2,
        "2 does not work with model.kv_lora_rank: each of the 8 heads has its own key and value, made of one vector; "
        "delete the setting",
    ),
    _case(
        "latent_attention_has_its_own_norms_and_rotation",
        "model.qk_norm",
        "head",
        '"head" does not work with model.kv_lora_rank: its vectors have norms, and model.qk_rope_head_dim says what is '
        "rotated; delete the setting, or choose another model.family",
    ),
    _case(
        "adapters_suit_latent_attention",
        "adapter.kind",
        "prefix",
        '"prefix" does not work with model.kv_lora_rank: its keys and values are made of one vector; use "lora"',
        "lora",
        **_ADAPTED,
    ),
    _case(
        "adapters_suit_latent_attention",
        "adapter.dropout",
        0.1,
        "0.1 does not work with model.kv_lora_rank: adapters of its vectors have no dropout; use 0.0",
        0.0,
        **_ADAPTED,
        adapter__kind="lora",
    ),
]
