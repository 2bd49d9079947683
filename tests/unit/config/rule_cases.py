"""Settings that break a rule, the message, and the remedy: the rules of families and of validation."""

from dataclasses import dataclass, field
from typing import Any

from tests.unit.config.runs import REMOVED


@dataclass(frozen=True)
class Case:
    """Settings that break one rule, what is said of them, and the settings that the remedy names."""

    rule: str
    changes: dict[str, Any]
    said: str
    cure: dict[str, Any]
    world_size: int | None = None
    cured_world_size: int | None = None
    also: tuple[str, ...] = field(default=())
    """Keys of the problems that cannot be had apart from this one."""


_GEMMA_2 = {"model.family": "gemma2", "model.tie_word_embeddings": True}
_LONGROPE = {
    "model.rope_type": "longrope",
    "model.rope_factor": 4.0,
    "model.rope_original_positions": 512,
    "model.rope_short_factor": [1.0] * 3,
    "model.rope_long_factor": [2.0] * 3,
}

FAMILY_CASES = [
    Case(
        "family_can_be_exported",
        {"model.sliding_window": 8},
        "model.sliding_window: 8 cannot be written in a llama config.json, which has no such "
        "key; delete the setting, choose another model.family, or set checkpoint.export = false",
        {"model.sliding_window": 8, "model.family": "mistral"},
    ),
    Case(
        "family_can_be_exported",
        {"model.norm_placement": "post"},
        'model.norm_placement: "post" cannot be written in a llama config.json, which has '
        '"pre"; use "pre", choose another model.family, or set checkpoint.export = false',
        {"model.norm_placement": "post", "checkpoint.export": False},
    ),
    Case(
        "sinks_are_computed_by_blocks",
        {"model.attention_sinks": True, "checkpoint.export": False, "training.compile": True},
        "training.compile: true does not work with model.attention_sinks = true: torch.compile cannot trace their "
        "attention; use training.compile = false",
        {"model.attention_sinks": True, "checkpoint.export": False, "training.compile": False},
    ),
    Case(
        "rotated_share_is_even",
        {"model.head_dim": 8, "model.partial_rotary_factor": 0.4, "checkpoint.export": False},
        "model.partial_rotary_factor: 0.4 of head_dim = 8 is 3, but rotary embeddings rotate pairs; use 0.25",
        {"model.head_dim": 8, "model.partial_rotary_factor": 0.25, "checkpoint.export": False},
    ),
    Case(
        "family_can_be_exported",
        {"model.family": "gpt2"},
        "model.num_key_value_heads: 4 cannot be written in a gpt2 config.json, which has 8; "
        "use 8, choose another model.family, or set checkpoint.export = false",
        {"model.family": "gpt2", "model.num_key_value_heads": 8},
    ),
    Case(
        "family_can_be_exported",
        {
            "model.family": "gpt2",
            "model.num_key_value_heads": 8,
            "model.rope_type": "linear",
            "model.rope_factor": 2.0,
        },
        'model.rope_type: "linear" cannot be written in a gpt2 config.json; '
        'use "default", or checkpoint.export = false',
        {
            "model.family": "gpt2",
            "model.num_key_value_heads": 8,
            "model.rope_type": "default",
            "model.rope_factor": 1.0,
        },
    ),
    Case(
        "rope_settings_belong_to_their_type",
        {"model.rope_factor": 2.0},
        'model.rope_factor: has no effect with model.rope_type = "default"; set '
        'model.rope_type to "linear" or "dynamic" or "llama3" or "yarn" or "longrope", or '
        "delete the setting",
        {"model.rope_factor": 2.0, "model.rope_type": "linear"},
    ),
    Case(
        "rope_settings_belong_to_their_type",
        {"model.rope_type": "llama3"},
        'model.rope_factor: is required with model.rope_type = "llama3"; set it, as in 4.0, or model.rope_type = '
        '"default"',
        {"model.rope_type": "llama3", "model.rope_factor": 1.0},
    ),
    Case(
        "rope_settings_belong_to_their_type",
        {"model.rope_type": "llama3", "model.rope_factor": 8.0, "model.rope_low_freq_factor": 4.0},
        "model.rope_low_freq_factor: 4.0 is not less than model.rope_high_freq_factor; use "
        "1.0, with model.rope_high_freq_factor 4.0, as in Llama 3.1",
        {"model.rope_type": "llama3", "model.rope_factor": 8.0, "model.rope_low_freq_factor": 1.0},
    ),
    Case(
        "rope_settings_belong_to_their_type",
        {"model.rope_type": "linear", "model.rope_factor": 2.0, "model.rope_beta_fast": 16.0},
        'model.rope_beta_fast: has no effect with model.rope_type = "linear"; '
        'set model.rope_type to "yarn", or delete the setting',
        {"model.rope_type": "yarn", "model.rope_factor": 2.0, "model.rope_beta_fast": 16.0},
    ),
    Case(
        "yarn_and_longrope_have_their_numbers",
        {"model.rope_type": "yarn", "model.rope_factor": 2.0, "model.rope_beta_slow": 64.0},
        "model.rope_beta_fast: 32.0 is less than model.rope_beta_slow = 64.0; use 32.0, "
        "with model.rope_beta_slow 1.0, as in YaRN's paper",
        {"model.rope_type": "yarn", "model.rope_factor": 2.0, "model.rope_beta_slow": 32.0},
    ),
    Case(
        "yarn_and_longrope_have_their_numbers",
        {**_LONGROPE, "model.rope_long_factor": [1.0, 2.0]},
        "model.rope_long_factor: has 2 numbers, but a head has 3 rotated pairs; give 3 numbers",
        _LONGROPE,
    ),
    Case(
        "yarn_and_longrope_have_their_numbers",
        {name: value for name, value in _LONGROPE.items() if name != "model.rope_factor"},
        "model.rope_factor: is required where model.max_position_embeddings 2048 is more than "
        "model.rope_original_positions 512; use 4",
        {**_LONGROPE, "model.rope_factor": 1.0},
    ),
    Case(
        "scaled_rotations_can_be_computed",
        {"model.rope_type": "dynamic", "model.rope_factor": 2.0, "model.head_dim": 2},
        'model.rope_type: "dynamic" needs more than one rotated pair per head; use "linear"',
        {"model.rope_type": "linear", "model.rope_factor": 2.0, "model.head_dim": 2},
    ),
    Case(
        "scaled_rotations_can_be_computed",
        {"model.rope_type": "yarn", "model.rope_factor": 2.0, "model.rope_theta": 1.0},
        "model.rope_theta: 1.0 is not more than 1, as yarn requires; use 10000.0",
        {"model.rope_type": "yarn", "model.rope_factor": 2.0, "model.rope_theta": 10000.0},
    ),
    Case(
        "scaled_rotations_can_be_computed",
        {**_LONGROPE, "model.rope_original_positions": 1},
        "model.rope_original_positions: 1 is too short: longrope divides by its logarithm; "
        "use the sequence length of pre-training, for example 4096",
        _LONGROPE,
    ),
    Case(
        "window_leaves_layers",
        {"model.full_attention_layers": 2, "model.family": "qwen2"},
        "model.full_attention_layers: 2 has no effect without model.sliding_window; set "
        "model.sliding_window, or delete the setting",
        {"model.full_attention_layers": 2, "model.family": "qwen2", "model.sliding_window": 4},
    ),
    Case(
        "window_leaves_layers",
        {"model.full_attention_layers": 4, "model.family": "qwen2", "model.sliding_window": 4},
        "model.full_attention_layers: 4 leaves no layer of model.num_hidden_layers = 4 with the sliding window; "
        "use at most 3, or delete model.sliding_window",
        {"model.full_attention_layers": 3, "model.family": "qwen2", "model.sliding_window": 4},
    ),
    Case(
        "window_leaves_layers",
        {**_GEMMA_2, "model.full_attention_every": 1, "model.sliding_window": 4},
        "model.full_attention_every: 1 leaves no layer of model.num_hidden_layers = 4 with the "
        "sliding window; use 2 or more, "
        "or delete model.sliding_window",
        {**_GEMMA_2, "model.full_attention_every": 2, "model.sliding_window": 4},
    ),
    Case(
        "window_leaves_layers",
        {**_GEMMA_2, "model.family": "gemma3_text", "model.rope_local_base_freq": 1e4},
        "model.rope_local_base_freq: 10000.0 has no effect without model.sliding_window; set "
        "model.sliding_window, or delete the setting",
        {
            **_GEMMA_2,
            "model.family": "gemma3_text",
            "model.rope_local_base_freq": 1e4,
            "model.sliding_window": 4,
        },
    ),
    Case(
        "family_can_be_exported",
        {"model.family": "gemma2", "model.tie_word_embeddings": False},
        "model.tie_word_embeddings: false cannot be written in a gemma2 config.json, which has "
        "true; use true, choose another "
        "model.family, or set checkpoint.export = false",
        _GEMMA_2,
    ),
    Case(
        "family_can_be_exported",
        {"model.attn_logit_softcapping": 50.0},
        "model.attn_logit_softcapping: 50.0 cannot be written in a llama config.json, which "
        "has no such key; delete the setting, choose another model.family, or set checkpoint.export = "
        "false",
        {**_GEMMA_2, "model.attn_logit_softcapping": 50.0},
    ),
    Case(
        "offload_has_its_stage",
        {"deepspeed.zero_optimization.offload_optimizer.device": "cpu"},
        'deepspeed.zero_optimization.offload_optimizer: device "cpu" has no effect: ZeRO stage 0 does not partition '
        'the optimizer state; use stage 1 or higher, or device "none"',
        {
            "deepspeed.zero_optimization.offload_optimizer.device": "cpu",
            "deepspeed.zero_optimization.stage": 1,
        },
    ),
    Case(
        "offload_has_its_stage",
        {"deepspeed.zero_optimization.offload_param.device": "cpu"},
        'deepspeed.zero_optimization.offload_param: device "cpu" has no effect: ZeRO stage 0 does not partition the '
        'weights; use stage 3, or device "none"',
        {"deepspeed.zero_optimization.stage": 3, "deepspeed.zero_optimization.offload_param.device": "cpu"},
    ),
    Case(
        "offload_has_a_device",
        {
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_optimizer.device": "disk",
        },
        'deepspeed.zero_optimization.offload_optimizer.device: "disk" is not a device that DeepSpeed '
        'offloads to; use "cpu", "nvme" or "none"',
        {
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_optimizer.device": "cpu",
        },
    ),
    Case(
        "offload_to_disk_has_its_folder",
        {
            "deepspeed.zero_optimization.stage": 2,
            "deepspeed.zero_optimization.offload_optimizer.device": "nvme",
        },
        'deepspeed.zero_optimization.offload_optimizer.device: "nvme" needs ZeRO stage 3, but the stage is 2; '
        'use stage 3, or "cpu"',
        {
            "deepspeed.zero_optimization.stage": 2,
            "deepspeed.zero_optimization.offload_optimizer.device": "cpu",
        },
    ),
    Case(
        "offload_to_disk_has_its_folder",
        {"deepspeed.zero_optimization.stage": 3, "deepspeed.zero_optimization.offload_param.device": "nvme"},
        'deepspeed.zero_optimization.offload_param.nvme_path: is required with device = "nvme"; '
        "set it to a folder on that disk",
        {
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_param.device": "nvme",
            "deepspeed.zero_optimization.offload_param.nvme_path": "disk",
        },
    ),
    Case(
        "offload_to_disk_has_its_folder",
        {
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_optimizer.device": "nvme",
            "deepspeed.zero_optimization.offload_optimizer.nvme_path": "disk",
            "deepspeed.zero_optimization.offload_optimizer.pipeline_read": True,
        },
        "deepspeed.zero_optimization.offload_optimizer.pipeline_read: is not supported: a "
        "checkpoint could read state "
        "that is not on the disk yet; set it to false",
        {
            "deepspeed.zero_optimization.stage": 3,
            "deepspeed.zero_optimization.offload_optimizer.device": "nvme",
            "deepspeed.zero_optimization.offload_optimizer.nvme_path": "disk",
            "deepspeed.zero_optimization.offload_optimizer.pipeline_read": False,
        },
    ),
    Case(
        "zero_cuts_no_matrix_of_the_optimizer",
        {"optimizer.name": "muon", "deepspeed.zero_optimization.stage": 2},
        'optimizer.name: "muon" is not supported with ZeRO 2: its partitions cut through matrices; '
        'use "adamw", "sgd" or "lion", or delete [deepspeed]',
        {"optimizer.name": "lion", "deepspeed.zero_optimization.stage": 2},
    ),
    Case(
        "the_native_optimizer_is_adamw_under_zero",
        {"deepspeed.native_optimizer": True},
        "deepspeed.native_optimizer: true has no effect without ZeRO: DeepSpeed is used only for ZeRO; "
        "set deepspeed.zero_optimization.stage to 1, 2 or 3, or use false",
        {"deepspeed.native_optimizer": True, "deepspeed.zero_optimization.stage": 1},
    ),
    Case(
        "the_native_optimizer_is_adamw_under_zero",
        {
            "deepspeed.native_optimizer": True,
            "deepspeed.zero_optimization.stage": 1,
            "optimizer.name": "sgd",
        },
        'deepspeed.native_optimizer: true has no effect: DeepSpeed has no compiled form of optimizer.name = "sgd"; '
        'use optimizer.name "adamw", or false',
        {
            "deepspeed.native_optimizer": False,
            "deepspeed.zero_optimization.stage": 1,
            "optimizer.name": "sgd",
        },
    ),
]


HELD_OUT = {"data.split": [0.9, 0.1]}
VALIDATION_CASES = [
    *(
        Case(
            "chosen_steps_are_of_the_run",
            {f"monitor.{key}": [10, 11]},
            f"monitor.{key}: step 11 never comes: the last one is training.steps = 10; use steps from 1 to 10",
            {f"monitor.{key}": [1, 10]},
        )
        for key in ("profile_steps", "trace_steps")
    ),
    Case(
        "validation_has_text",
        {"validation.every": 5},
        "validation.every: 5 needs validation text; set data.validation or data.split, or delete the setting",
        HELD_OUT,
    ),
    Case(
        "patience_needs_validations",
        HELD_OUT | {"validation.patience": 3},
        "validation.patience: 3 has no effect: the only validation is after the last step; "
        "set validation.every, for example 100",
        {"validation.every": 5},
    ),
    Case(
        "improvement_is_for_patience",
        HELD_OUT | {"validation.every": 5, "validation.minimum_improvement": 0.1},
        "validation.minimum_improvement: 0.1 has no effect without validation.patience; set "
        "validation.patience, or delete the setting",
        {"validation.patience": 3},
    ),
    *(
        Case(
            "intervals_are_steps_or_epochs",
            HELD_OUT | {f"{section}.every": "half an epoch"},
            f'{section}.every: "half an epoch" is no number of epochs; write a number of steps, or epochs as in '
            '"1 epoch" or "0.5 epochs"',
            {f"{section}.every": "1/2 epochs"},
        )
        for section in ("validation", "checkpoint")
    ),
    Case(
        "keeping_some_means_deleting_others",
        {"checkpoint.keep_every": 1000},
        "checkpoint.keep_every: 1000 has no effect: no checkpoint is deleted; "
        "set checkpoint.keep_last, or delete the setting",
        {"checkpoint.keep_last": 3},
    ),
    Case(
        "best_checkpoint_needs_text",
        {"checkpoint.best": True},
        "checkpoint.best: true needs validation text, whose loss decides which checkpoint is the best; "
        "set data.validation or data.split",
        {"data.validation": "held-out.txt"},
    ),
    Case(
        "best_export_needs_its_checkpoint",
        HELD_OUT | {"checkpoint.export": "best"},
        'checkpoint.export: "best" needs a best checkpoint; set checkpoint.best = true',
        {"checkpoint.best": True},
    ),
    *(
        Case(
            "tf32_is_a_way_to_multiply_fp32",
            {"training.tf32": True, "training.precision": precision},
            f'training.tf32: true has no effect with training.precision = "{precision}"; set training.precision = '
            '"fp32", or delete the setting',
            {"training.tf32": True, "training.precision": "fp32"},
        )
        for precision in ("auto", "bf16", "fp16", "fp64")
    ),
    Case(
        "loss_scale_skips_by_itself",
        {"training.nonfinite": "skip", "training.precision": "fp16"},
        'training.nonfinite: "skip" has no effect with training.precision = "fp16", whose loss scale skips such steps '
        'itself; use "stop", which ends the run at training.minimum_loss_scale',
        {"training.nonfinite": "stop"},
    ),
    *(
        Case(
            "rollback_needs_checkpoints",
            {f"training.{name}": "rollback", "checkpoint.every": REMOVED},
            f'training.{name}: "rollback" needs checkpoints: the only one is after the last step; set '
            "checkpoint.every, for example 100",
            {f"training.{name}": "rollback", "checkpoint.every": 100},
        )
        for name in ("nonfinite", "loss_spike")
    ),
]

_BLEND = {
    "data.source": REMOVED,
    "data.blend": [{"source": "a", "weight": 1.0}, {"source": "b", "weight": 3.0}],
}

CURRICULUM_CASES = [
    Case(
        "curriculum_has_a_weight_for_each_set",
        {"data.curriculum": [{"step": 5, "weights": [1.0]}]},
        "data.curriculum: changes the weights of [[data.blend]], which is not set; name the data sets in "
        "[[data.blend]], or delete the curriculum",
        {"data.curriculum": REMOVED},
    ),
    Case(
        "curriculum_has_a_weight_for_each_set",
        {**_BLEND, "data.curriculum": [{"step": 5, "weights": [1, 2, 3]}]},
        "data.curriculum[1].weights: [1.0, 2.0, 3.0] has 3, but there are 2 [[data.blend]] tables; write one weight "
        "for each, in their order",
        {"data.curriculum": [{"step": 5, "weights": [1, 2]}]},
    ),
    Case(
        "curriculum_has_a_weight_for_each_set",
        {**_BLEND, "data.curriculum": [{"step": 5, "weights": [1.0, -1.0]}]},
        "data.curriculum[1].weights: [1.0, -1.0] has a weight below 0; use 0 to pause a data set",
        {"data.curriculum": [{"step": 5, "weights": [1, 0]}]},
    ),
    Case(
        "curriculum_has_a_weight_for_each_set",
        {**_BLEND, "data.curriculum": [{"step": 5, "weights": [0.0, 0.0]}]},
        "data.curriculum[1].weights: [0.0, 0.0] pauses every data set; use a positive weight for one of them",
        {"data.curriculum": [{"step": 5, "weights": [0, 1]}]},
    ),
    Case(
        "curriculum_steps_rise",
        {
            **_BLEND,
            "data.curriculum": [{"step": 5, "weights": [1, 2]}, {"step": 5, "weights": [2, 1]}],
        },
        "data.curriculum[2].step: 5 does not come after data.curriculum[1].step = 5; use 6 or more, or sort the "
        "tables by step",
        {"data.curriculum": [{"step": 5, "weights": [1, 2]}, {"step": 6, "weights": [2, 1]}]},
    ),
    Case(
        "curriculum_steps_rise",
        {**_BLEND, "data.curriculum": [{"step": 1, "weights": [1, 2]}]},
        "data.curriculum[1].step: 1 does not come after the first step; use 2 or more, or set the first weights in "
        "[[data.blend]]",
        {"data.curriculum": [{"step": 2, "weights": [1, 2]}]},
    ),
    Case(
        "curriculum_steps_rise",
        {**_BLEND, "data.curriculum": [{"step": 11, "weights": [1, 2]}]},
        "data.curriculum[1].step: 11 is behind training.steps = 10; use 10 or less, or more training.steps",
        {"data.curriculum": [{"step": 10, "weights": [1, 2]}]},
    ),
    Case(
        "blend_weights_are_positive",
        {
            "data.source": REMOVED,
            "data.blend": [{"source": "a", "weight": 0}, {"source": "b", "weight": 1}],
            "data.curriculum": [{"step": 5, "weights": [0, 1]}],
        },
        "data.blend[1].weight: 0 in every step; use a positive weight here or in data.curriculum",
        {"data.curriculum": [{"step": 5, "weights": [0.5, 1]}]},
    ),
    Case(
        "blend_weights_are_positive",
        {
            "data.source": REMOVED,
            "data.blend": [{"source": "a", "weight": 0}],
            "data.curriculum": [{"step": 5, "weights": [1]}],
        },
        "data.blend: has the weight 0 in every table; use a positive weight in one of them",
        {"data.blend": [{"source": "a", "weight": 1}]},
    ),
]

INSTRUCT_CASES = [
    Case(
        "tokens_are_added_to_a_tokenizer",
        {"tokenizer.add_tokens": ["<|user|>"]},
        "tokenizer.add_tokens: needs an existing tokenizer; set tokenizer.path, or delete the setting: a new tokenizer "
        "has ids for every text",
        {"tokenizer.add_tokens": REMOVED},
    ),
    Case(
        "tokens_are_added_to_a_tokenizer",
        {
            "tokenizer.add_tokens": ["<a>", "<b>", "<a>"],
            "tokenizer.path": ".",
            "tokenizer.vocab_size": "auto",
        },
        'tokenizer.add_tokens: names "<a>" twice; name every token once',
        {"tokenizer.add_tokens": ["<a>", "<b>"]},
    ),
    Case(
        "settings_of_conversations_need_some",
        {"data.train_on": "last"},
        'data.train_on: has no effect with data.kind = "text"; delete it, or set data.kind = "instruct"',
        {"data.kind": "instruct"},
    ),
    Case(
        "settings_of_conversations_need_some",
        {"tokenizer.chat_template": "chatml"},
        'tokenizer.chat_template: has no effect with data.kind = "text"; delete it, or set data.kind = "instruct"',
        {"data.kind": "instruct"},
    ),
    Case(
        "settings_of_conversations_need_some",
        {"data.length_buckets": 4},
        'data.length_buckets: has no effect with data.kind = "text"; delete it, or set data.kind = "instruct"',
        {"data.length_buckets": 0},
    ),
    Case(
        "length_buckets_are_for_unpacked_conversations",
        {"data.kind": "instruct", "data.length_buckets": 4},
        'data.length_buckets: is for unpacked conversations, but data.packing is "best_fit"; delete it, or set '
        'data.packing = "none"',
        {"data.packing": "none"},
    ),
    Case(
        "length_buckets_are_for_unpacked_conversations",
        {
            "data.kind": "instruct",
            "data.packing": "none",
            "data.length_buckets": 4,
            "data.source": REMOVED,
            "data.blend": [{"source": "a", "weight": 1}],
        },
        "data.length_buckets: is for a single data set, not for [[data.blend]]; delete it, or name all files as "
        "data.source",
        {"data.length_buckets": REMOVED},
    ),
    Case(
        "concatenated_conversations_have_any_length",
        {"data.kind": "instruct", "data.packing": "concatenate", "data.too_long": "drop"},
        'data.too_long: has no effect with data.packing = "concatenate", which cuts every conversation at the end of a '
        "row; delete it, or choose another data.packing",
        {"data.too_long": REMOVED},
    ),
    Case(
        "conversations_have_no_settings_of_text",
        {"data.kind": "instruct", "data.text_column": "question"},
        'data.text_column: has no effect with data.kind = "instruct"; delete it, or set data.kind = "text"',
        {"data.text_column": REMOVED},
    ),
    Case(
        "conversations_have_no_settings_of_text",
        {
            "data.kind": "instruct",
            "data.source": REMOVED,
            "data.blend": [{"source": "a", "weight": 1, "text_column": "question"}],
        },
        'data.blend[1].text_column: has no effect with data.kind = "instruct"; delete it, or set data.kind = "text"',
        {"data.kind": "text"},
    ),
]
