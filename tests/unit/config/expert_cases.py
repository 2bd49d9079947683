"""Rules over mixtures of experts."""

from pathlib import Path
from typing import Any

from tests.unit.config.rule_cases import Case
from tests.unit.config.runs import REMOVED

MIXTURE: dict[str, Any] = {
    "model.family": "qwen3_moe",
    "model.num_experts": 6,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 20,
}
_GROUPED = {**MIXTURE, "model.n_group": 3, "model.topk_group": 2, "checkpoint.export": False}
# Sigmoids and correction biases are the family's own, and set nowhere.
_OF_V3 = {**_GROUPED, "model.family": "deepseek_v3"}
FOLDER = str(Path(__file__).parent / "small_llama")
_ADAPTED = {**MIXTURE, "model.weights": FOLDER, "adapter.kind": "lora", "checkpoint.export": False}
_SPREAD = {**MIXTURE, "parallel.data": 2, "parallel.expert": 2}
_ZERO = "deepspeed.zero_optimization.stage"
_STAGES = {**_SPREAD, "parallel.pipeline": 2, "checkpoint.export": False, _ZERO: 1}
_SHARED = {**_ADAPTED, "model.shared_intermediate_size": 10, "model.first_k_dense_replace": 1}
_WITHOUT_WIDTH = {name: value for name, value in MIXTURE.items() if "moe_intermediate" not in name}


def _case(rule: str, key: str, value: Any, said: str, cure: Any = None, **changes: Any) -> Case:
    """Return a case of one bad setting in a mixture; cure: a good value, None: the setting is left out."""
    base = {**MIXTURE, **{name.replace("__", "."): other for name, other in changes.items()}}
    return Case(rule, {**base, key: value}, f"{key}: {said}", {key: REMOVED if cure is None else cure})


EXPERT_CASES = [
    Case(
        "settings_of_experts_have_experts",
        {"model.num_experts_per_tok": 2},
        "model.num_experts_per_tok: has no effect without model.num_experts; set model.num_experts, or delete the "
        "setting",
        MIXTURE,
    ),
    Case(
        "settings_of_experts_have_experts",
        {"training.router_balance": 0.01},
        "training.router_balance: has no effect without model.num_experts; set model.num_experts, or delete the "
        "setting",
        {**MIXTURE, "training.router_balance": 0.01},
    ),
    Case(
        "experts_have_their_sizes",
        _WITHOUT_WIDTH,
        "model.moe_intermediate_size: is required with model.num_experts = 6; set it, as in 76",
        MIXTURE,
    ),
    _case(
        "tokens_find_their_experts",
        "model.num_experts_per_tok",
        7,
        "7 is more than model.num_experts = 6; use at most 6",
        6,
    ),
    Case(
        "tokens_find_their_experts",
        {**_GROUPED, "model.n_group": 4},
        "model.n_group: 4 does not divide model.num_experts = 6 into groups of 1 or more; use one of [1, 2, 3, 6]",
        _GROUPED,
    ),
    Case(
        "tokens_find_their_experts",
        {**_GROUPED, "model.n_group": 6, "model.router_scores": "sigmoid"},
        "model.n_group: 6 does not divide model.num_experts = 6 into groups of 2 or more; use one of [1, 2, 3]",
        {**_GROUPED, "model.router_scores": "sigmoid"},
    ),
    Case(
        "tokens_find_their_experts",
        {**_OF_V3, "model.n_group": 6},
        "model.n_group: 6 does not divide model.num_experts = 6 into groups of 2 or more; use one of [1, 2, 3]",
        {**_OF_V3, "training.router_bias_rate": 0.001},
    ),
    Case(
        "tokens_find_their_experts",
        {**_GROUPED, "model.topk_group": 4},
        "model.topk_group: 4 is more than model.n_group = 3; use at most 3",
        _GROUPED,
    ),
    Case(
        "tokens_find_their_experts",
        {**_GROUPED, "model.topk_group": 1, "model.num_experts_per_tok": 3},
        "model.num_experts_per_tok: 3 is more than the 2 experts of model.topk_group = 1 groups; use at most 2",
        {**_GROUPED, "model.topk_group": 1},
    ),
    _case(
        "some_layers_have_experts",
        "model.mlp_only_layers",
        [1, 4],
        "4 is none of the layers 0 to 3; use [1]",
        [1],
    ),
    Case(
        "some_layers_have_experts",
        {**MIXTURE, "model.decoder_sparse_step": 5},
        "model.num_experts: no layer of 4 has experts: all keep the dense MLP; delete model.decoder_sparse_step, "
        "or model.num_experts",
        {"model.decoder_sparse_step": REMOVED},
    ),
    _case(
        "experts_are_gated_by_silu",
        "model.hidden_act",
        "gelu",
        '"gelu" does not work with model.num_experts = 6: an expert is down(silu(gate(x)) * up(x)), with biases by '
        'model.expert_bias; use "silu"',
        checkpoint__export=False,
    ),
    _case(
        "experts_have_no_dropout",
        "model.mlp_dropout",
        0.1,
        "0.1 does not work with model.num_experts = 6; use model.residual_dropout, on the output of all experts "
        "together",
    ),
    _case(
        "experts_have_whole_sequences",
        "training.sequence_chunk",
        8,
        "8 does not work with model.num_experts = 6: experts take whole sequences; delete the setting, or set "
        "model.chunked_loss = 8 for the loss alone",
    ),
    _case(
        "experts_are_not_compiled",
        "training.compile",
        True,
        "true does not work with model.num_experts = 6: the sizes of the experts' products change from step to step; "
        "use training.compile = false",
        False,
    ),
    Case(
        "experts_are_adapted_alike",
        {**_ADAPTED, "adapter.targets": ["q_proj", "*.experts.3.up_proj", "*.experts.1.up_proj"]},
        "adapter.targets: names 2 of the 6 experts in model.layers.0.mlp.experts.*.up_proj; name all experts of a "
        'layer, as in "*.experts.*.up_proj"',
        {**_ADAPTED, "adapter.targets": ["*.experts.*.up_proj"]},
    ),
    Case(
        "experts_are_adapted_alike",
        {**_ADAPTED, "adapter.dropout": 0.1},
        "adapter.dropout: 0.1 does not work with adapters of experts (model.layers.0.mlp.experts.*.gate_proj), nor in "
        "PEFT; delete the setting, or name other linears in adapter.targets",
        {**_ADAPTED, "adapter.dropout": 0.1, "adapter.targets": ["q_proj"]},
    ),
    Case(
        "experts_are_adapted_alike",
        {**_ADAPTED, "adapter.dora": True},
        "adapter.dora: true does not work with adapters of experts (model.layers.0.mlp.experts.*.gate_proj), nor in "
        "PEFT; delete the setting, or name other linears in adapter.targets",
        {**_ADAPTED, "adapter.dora": REMOVED},
    ),
    Case(
        "adapter_patterns_name_modules",
        {**_SHARED, "adapter.targets": ["q_proj", "gate"]},
        'adapter.targets: "gate" names no linear of a layer; a router has no adapter; use q_proj, k_proj, v_proj, '
        "o_proj, gate_proj, up_proj, down_proj",
        {**_SHARED, "adapter.targets": ["shared_experts.up_proj", "mlp.up_proj"]},
    ),
    _case(
        "router_biases_are_there_to_change",
        "training.router_bias_rate",
        0.001,
        "0.001 has no effect without model.router_correction_bias = true; use training.router_balance, or delete the "
        "setting",
    ),
    Case(
        "router_biases_are_there_to_change",
        {
            **_ADAPTED,
            "adapter.targets": ["q_proj"],
            "model.router_correction_bias": True,
            "training.router_bias_rate": 0.001,
        },
        'training.router_bias_rate: 0.001 changes a weight of the model, but adapter.kind = "lora" trains none; '
        "use training.router_balance, or delete the setting",
        {"training.router_bias_rate": REMOVED},
    ),
    Case(
        "zero_finds_as_many_experts_on_every_rank",
        {**_SPREAD, "parallel.expert": 4, "parallel.data": 4, _ZERO: 2},
        "parallel.expert: 4 ranks cannot have as many of model.num_experts = 6 each, but ZeRO 2 reduces buckets of "
        "gradients that must be the same on all; use one of [1, 2, 3, 6], or deepspeed.zero_optimization.stage 1",
        {**_SPREAD, "parallel.expert": 4, "parallel.data": 4, _ZERO: 1},
        world_size=4,
    ),
    Case(
        "zero_finds_as_many_experts_on_every_rank",
        {**_SPREAD, "parallel.expert": 4, "parallel.data": 4, _ZERO: 3},
        "parallel.expert: 4 ranks cannot have as many of model.num_experts = 6 each, but ZeRO 3 gathers buckets of "
        "weights that must be the same on all; use one of [1, 2, 3, 6], or deepspeed.zero_optimization.stage 1",
        {**_SPREAD, "parallel.expert": 4, "parallel.data": 4, _ZERO: 1},
        world_size=4,
    ),
    Case(
        "zero_finds_experts_on_every_stage",
        {**_STAGES, "model.first_k_dense_replace": 2},
        "deepspeed.zero_optimization.stage: 1 needs experts on each of the 2 stages of the pipeline, but stage 0 has "
        "dense layers only; use 0, or other stages (parallel.pipeline, parallel.layers_per_stage)",
        {**_STAGES, "model.first_k_dense_replace": 1},
        world_size=4,
    ),
    Case(
        "zero_trains_experts_on_every_stage",
        {**_STAGES, **_ADAPTED, "adapter.targets": ["q_proj", "model.layers.0.mlp.experts.*.up_proj"]},
        "adapter.targets: name experts on some of the 2 stages of the pipeline, but none on stage 1: ZeRO sums experts "
        "on all stages or on none; name experts in layers of every stage, or of none, or use "
        "deepspeed.zero_optimization.stage 0",
        {**_STAGES, **_ADAPTED, "adapter.targets": ["q_proj"]},
        world_size=4,
    ),
    Case(
        "zero_2_scatters_sums_of_experts",
        {**_SPREAD, _ZERO: 2, "deepspeed.zero_optimization.reduce_scatter": False},
        "deepspeed.zero_optimization.reduce_scatter: false does not work with model.num_experts = 6: DeepSpeed sums "
        "experts over other ranks than dense weights only where it scatters; use true",
        {**_SPREAD, _ZERO: 2, "deepspeed.zero_optimization.reduce_scatter": True},
        world_size=2,
    ),
    Case(
        "zero_3_has_no_router_biases",
        {**MIXTURE, "model.router_correction_bias": True, "checkpoint.export": False, _ZERO: 3},
        "deepspeed.zero_optimization.stage: 3 partitions model.router_correction_bias, which no optimizer changes; "
        "use 1 or 2",
        {**MIXTURE, "model.router_correction_bias": True, "checkpoint.export": False, _ZERO: 2},
    ),
    Case(
        "expert_ranks_have_experts",
        {"parallel.expert": 2, "parallel.data": 2},
        "parallel.expert: 2 ranks divide experts, but the model has none; use 1",
        {"parallel.expert": 1},
    ),
    Case(
        "expert_ranks_have_experts",
        {"parallel.expert_tensor": 1},
        "parallel.expert_tensor: 1 ranks share each expert, but the model has none; leave it out",
        {"parallel.expert_tensor": REMOVED},
    ),
    _case(
        "expert_ranks_have_experts",
        "parallel.expert",
        8,
        "8 ranks cannot divide model.num_experts = 6; use at most 6",
        2,
        parallel__data=8,
        training__global_batch_size=16,
    ),
    _case(
        "tensor_fits_the_widths_of_experts",
        "parallel.tensor",
        4,
        "4 ranks cannot share model.moe_intermediate_size = 3; use at most 3",
        3,
        model__moe_intermediate_size=3,
        model__num_attention_heads=12,
        model__num_key_value_heads=12,
        model__hidden_size=48,
    ),
    _case(
        "expert_tensor_is_one_or_tensor",
        "parallel.expert_tensor",
        2,
        "2 ranks cannot share each expert with parallel.tensor = 4; use 1, or 4 as by default",
        1,
        parallel__tensor=4,
        parallel__sequence=True,
    ),
    _case(
        "whole_experts_need_sequence_parallelism",
        "parallel.expert_tensor",
        1,
        "1 leaves experts whole, and each tensor-parallel rank would send all tokens to them; use parallel.sequence "
        "true, or parallel.expert_tensor 2",
        2,
        parallel__tensor=2,
    ),
    _case(
        "experts_divide_the_ranks",
        "parallel.expert",
        3,
        "3 does not divide the 4 ranks of a stage; use 1 or 2 or 4: ranks of data * context * tensor",
        4,
        parallel__data=4,
    ),
    Case(
        "experts_divide_the_ranks",
        {**MIXTURE, "parallel.tensor": 2, "parallel.expert": 2},
        "parallel.expert: 2 groups of ranks of 2 each (parallel.expert_tensor) do not divide the 2 ranks of a stage; "
        "use parallel.data 2 or a multiple of it",
        {**MIXTURE, "parallel.tensor": 2, "parallel.expert": 2, "parallel.data": 2},
    ),
    Case(
        "family_can_be_exported",
        {**MIXTURE, "model.family": "mixtral"},
        "model.moe_intermediate_size: 20 cannot be written in a mixtral config.json, which has 76; use 76, choose "
        "another model.family, or set checkpoint.export = false",
        {**MIXTURE, "model.family": "mixtral", "model.intermediate_size": 20},
    ),
    Case(
        "family_can_be_exported",
        {"model.family": "olmoe", "model.num_key_value_heads": 8},
        "model.num_experts: 0 cannot be written in a olmoe config.json, which has 64; use 64, choose another "
        "model.family, or set checkpoint.export = false",
        {**MIXTURE, "model.family": "olmoe", "model.intermediate_size": 20},
    ),
]
