"""axolotl: YAML files. Keys and defaults are those of src/axolotl/utils/schemas of axolotl-ai-cloud/axolotl."""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.companions import answer_companions, find_deepspeed, named_files
from megalite.convert.adopt.keyed import axolotl_data, trainer, trainer_rates, tuning
from megalite.convert.adopt.keyed.keyed_file import answer_all, complete, idle, read_files, refused, require
from megalite.convert.adopt.rules import (
    OFF,
    KeyRule,
    NoEffect,
    Reading,
    Refuse,
    Switch,
    Take,
    Together,
    WordsOf,
    number,
    switch,
    text,
    whole,
)
from megalite.convert.adopt.sources import Source

NAME = "axolotl"
_LISTS = frozenset(
    {"datasets", "test_datasets", "pretraining_dataset", "plugins", "tokens"}
    | {"lora_target_modules", "lora_modules_to_save", "special_tokens.additional_special_tokens"}
)
_MODEL = "train another model, or keep axolotl for this one"
_REPORTS = "megalite writes metrics.jsonl, and TensorBoard with monitor.tensorboard"
_OPERATORS = "megalite chooses its operators itself"
_HARMLESS_PLUGINS = ("liger", "cut_cross_entropy", "lm_eval")


def _read_adapter(reading: Reading, key: str, value: Any) -> None:
    if value == "lora":
        reading.take(key, {"adapter.kind": "lora"})
    elif value == "qlora":
        reading.change(key, {"adapter.kind": "lora"}, "the base has 16 bits")
    elif value in ("", *OFF):
        reading.take(key, {"adapter.kind": "none"})
    else:
        reading.refuse(key, "megalite has lora, and prefix tuning of its own", "use lora, or leave it out")


def _read_linear_targets(reading: Reading, key: str, value: Any) -> None:
    if switch(value):
        tuning.read_targets(reading, key, "all")
    else:
        reading.no_effect(key, "it is off")


def _read_named_targets(reading: Reading, key: str, value: Any) -> None:
    if reading.is_on("lora_target_linear") or value == []:
        reading.no_effect(key, "lora_target_linear adapts every linear" if value else "it is empty")
    else:
        tuning.read_targets(reading, key, value)


def _read_batch(reading: Reading, key: str, value: Any) -> None:
    tuning.read_micro_batch(reading, key, value, pairs=reading.get("rl") in ("dpo", "ipo"))


def _read_precision(reading: Reading, key: str, value: Any) -> None:
    """bf16, fp16 and their long names; bf16: auto is bf16 where the card has it."""
    precision = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "float32": "fp32"}[
        key
    ]
    if value == "auto":
        if not (reading.is_on("fp16") or reading.is_on("float16")):
            reading.take(key, {"training.precision": precision})
        else:
            reading.no_effect(key, "fp16 decides")
    elif value == "full" or switch(value):
        reading.take(key, {"training.precision": precision}, "with fp32 master weights")
    else:
        reading.no_effect(key, "it is off")


def _read_tf32(reading: Reading, key: str, value: Any) -> None:
    if not reading.is_on("float32") or value == "auto":
        reading.no_effect(key, "products of bf16 and fp16 do not have it")
    else:
        reading.take(key, {"training.tf32": switch(value)})


def _read_checkpointing(reading: Reading, key: str, value: Any) -> None:
    words = ("offload", "unsloth", "offload_disk")
    reading.take(key, {"training.recompute": "full" if value in words or switch(value) else "none"})


def _read_of_preference(reading: Reading, key: str, value: Any) -> None:
    name = "label_smoothing" if "smoothing" in key else "beta"
    if reading.get("rl") in ("dpo", "ipo"):
        reading.take(key, {f"preference.{name}": number(value)})
    else:
        reading.no_effect(key, "the run trains no preferences")


def _read_template(reading: Reading, key: str, value: Any) -> None:
    if axolotl_data.kind_of(reading) == "text":
        reading.no_effect(key, "text has no template")
    elif value == "jinja" or key == "chat_template_jinja":
        reading.refuse(
            key, "megalite reads templates from files", "save it and set tokenizer.chat_template to the file"
        )
    else:
        tuning.read_template(reading, key, value)


def _read_plugins(reading: Reading, key: str, value: Any) -> None:
    others = [
        name
        for name in (tuning.names(value) if value else ())
        if not any(part in name for part in _HARMLESS_PLUGINS)
    ]
    if others:
        reading.refuse(key, f"megalite has no {', '.join(others)}", _MODEL)
    else:
        reading.no_effect(key, "they change speed and memory")


def _read_per_epoch(reading: Reading, key: str, value: Any) -> None:
    ours = "validation.every" if key.startswith("eval") else "checkpoint.every"
    if number(value) == 0:
        reading.take(key, {}, "only after the last step")
    else:
        remedy = f"set {ours} to the steps of an epoch divided by {value}"
        reading.refuse(key, "megalite counts steps", remedy, numbers=False)


def _read_least_rate(reading: Reading, key: str, value: Any) -> None:
    if (trainer_rates.schedule_of(reading) or "cosine") != "cosine":
        reading.no_effect(key, "the schedule is not cosine")
    else:
        reading.take(key, {"optimizer.minimum_ratio": number(value)})


_LORA: Mapping[str, KeyRule] = {
    "lora_r": Take("adapter.rank", whole),
    "lora_alpha": tuning.ALPHA,
    "lora_dropout": Take("adapter.dropout", number),
    "lora_target_modules": Together(_read_named_targets),
    "lora_target_linear": Together(_read_linear_targets),
    "lora_modules_to_save": Together(tuning.read_modules_to_save),
    "peft_use_dora": Switch({"adapter.dora": True}),
    "peft_use_rslora": Switch({"adapter.rslora": True}),
    "lora_model_dir": Take("adapter.path", text),
}
_TUNING: Mapping[str, KeyRule] = {
    "base_model": Together(tuning.read_model),
    "tokenizer_config": Take("tokenizer.path", text),
    "adapter": Together(_read_adapter),
    **tuning.of_lora(_LORA, "adapter", ("lora", "qlora")),
    "load_in_8bit": Refuse("megalite trains no base of 8 bits", tuning.BASE_REMEDY),
    "load_in_4bit": Refuse("megalite trains no base of 4 bits", tuning.BASE_REMEDY),
    "peft_init_lora_weights": Refuse("A starts at random and B at 0", "leave it out", (True, "default")),
    "chat_template": Together(_read_template),
    "chat_template_jinja": Together(_read_template),
    "rl": WordsOf(
        {
            "dpo": {"data.kind": "preference", "preference.loss": "sigmoid"},
            "ipo": {"data.kind": "preference", "preference.loss": "ipo"},
        },
        "use dpo or ipo",
    ),
    "rl_beta": Together(_read_of_preference),
    "dpo_beta": Together(_read_of_preference),
    "dpo_label_smoothing": Together(_read_of_preference),
    "datasets": Together(axolotl_data.read_datasets),
    "test_datasets": Together(axolotl_data.read_datasets),
    "pretraining_dataset": Together(axolotl_data.read_datasets),
    "val_set_size": Together(tuning.read_validation_share),
    "sample_packing": Together(axolotl_data.read_packing),
    "excess_length_strategy": Together(axolotl_data.read_too_long),
    "train_on_inputs": Together(axolotl_data.read_trained),
    "tokens": Together(axolotl_data.read_tokens),
    **{
        f"special_tokens.{name}": Together(axolotl_data.read_special_tokens)
        for name in ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
    },
    "added_tokens_overrides": Refuse("megalite adds tokens (tokenizer.add_tokens)", "leave it out", ({},)),
    "reinit_weights": Refuse("model.weights starts from weights", "set model.hf_config instead"),
    "shuffle_merged_datasets": Switch({"data.shuffle": True}, {"data.shuffle": False}),
    "sequence_len": Take("training.sequence_length", whole),
    "max_packed_sequence_len": Refuse(
        "axolotl no longer reads it", "set sequence_len and sample_packing", ()
    ),
    **refused("megalite has no context parallelism", "use parallel.tensor", "context_parallel_size", (1,)),
    **refused("megalite has no context parallelism", "use parallel.tensor", "sequence_parallel_degree", (1,)),
    "tensor_parallel_size": Take("parallel.tensor", whole),
    **idle("the replicas are the ranks that tensor and pipeline leave", "dp_shard_size dp_replicate_size"),
    "gptq": Refuse("megalite trains no base of 4 bits", tuning.BASE_REMEDY),
    "plugins": Together(_read_plugins),
    **refused(
        "megalite does not have it",
        _MODEL,
        "relora loraplus_lr_ratio lora_target_parameters lora_rank_pattern lora_alpha_pattern peft "
        "peft_layers_to_transform peft_layers_pattern peft_layer_replication "
        "peft_trainable_token_indices peft_ensure_weight_tying loftq_config unfrozen_parameters "
        "lisa_n_layers qat quantization reward_model process_reward_model trainer_cls "
        "dpo_use_weighting dpo_loss_type dpo_loss_weights dpo_norm_loss rpo_alpha fp8 use_pose "
        "s2_attention use_eaft llama4_linearized_experts scaling_softmax fp32_norms shrink_embeddings "
        "resize_token_embeddings_to_32x embeddings_skip_upcast lr_quadratic_warmup "
        "cosine_constant_lr_ratio lr_div_factor lr_groups embedding_lr embedding_lr_scale "
        "jagged_restart_steps rope_scaling noisy_embedding_alpha overrides_of_model_config "
        "overrides_of_model_kwargs sample_packing_sequentially curriculum_sampling batch_size "
        "dataset_exact_deduplication dataset_shard_num min_sample_len max_prompt_len "
        "default_system_message chat_template_kwargs eot_tokens use_onebitllms "
        "model_quantization_config processor_type is_multimodal orpo_alpha cpo_alpha simpo_gamma ebft "
        "diffusion dense_mixer kd_trainer quantize_moe_experts streaming "
        "pretraining_sample_concatenation fp32_norm_classes freeze_mm_modules mora hatchery",
        (False, 0, "none", [], {}, ""),
    ),
}


def _read_auto_resume(reading: Reading, key: str, value: Any) -> None:
    if reading.has("resume_from_checkpoint"):
        reading.no_effect(key, "resume_from_checkpoint takes precedence")
    else:
        trainer.read_resume(reading, key, value)


_TRAINING: Mapping[str, KeyRule] = {
    "micro_batch_size": Together(_read_batch),
    "num_epochs": Together(trainer_rates.read_length),
    "optimizer": Together(trainer_rates.read_optimizer),
    "cosine_min_lr_ratio": Together(_read_least_rate),
    "bf16": Together(_read_precision),
    "bfloat16": Together(_read_precision),
    "fp16": Together(_read_precision),
    "float16": Together(_read_precision),
    "float32": Together(_read_precision),
    "tf32": Together(_read_tf32),
    "gradient_checkpointing": Together(_read_checkpointing),
    "evals_per_epoch": Together(_read_per_epoch),
    "saves_per_epoch": Together(_read_per_epoch),
    "early_stopping_patience": Together(trainer_rates.read_patience),
    "use_tensorboard": Switch({"monitor.tensorboard": True}),
    "dataset_processes": Take("data.workers", whole),
    "dataset_num_proc": Take("data.workers", whole),
    "strict": NoEffect("megalite names every unknown key"),
    "auto_resume_from_checkpoints": Together(_read_auto_resume),
}
_IDLE: Mapping[str, KeyRule] = {
    **idle(
        "megalite reads Hugging Face's folders by their config.json, and runs no code of theirs",
        "base_model_config cls_model_config model_type type_of_model revision_of_model tokenizer_type "
        "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_save_jinja_files "
        "trust_remote_code processor_kwargs is_falcon_derived_model is_llama_derived_model "
        "is_mistral_derived_model is_qwen_derived_model experimental_skip_move_to_device "
        "mean_resizing_embeddings model_quantization_config_kwargs hf_use_auth_token",
    ),
    **idle(
        _OPERATORS,
        "flash_attention flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm "
        "flash_attn_fuse_qkv flash_optimum xformers_attention sdp_attention flex_attention "
        "flex_attn_compile_kwargs sage_attention eager_attention attn_implementation "
        "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen fused_attn_kernel "
        "experts_implementation lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv "
        "unsloth_lora_o unsloth_rms_norm unsloth_rope cut_cross_entropy liger_rope liger_rms_norm "
        "liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy "
        "liger_fused_linear_cross_entropy liger_use_token_scaling use_kernels deepcompile "
        "torch_compile_options selective_checkpointing activation_offloading layer_offloading "
        "gc_steps gc_collect_steps dpo_use_liger_kernel dpo_padding_free precompute_ref_log_probs "
        "dpo_use_logits_to_keep dpo_generate_during_eval lora_fan_in_fan_out lora_on_cpu "
        "qlora_sharded_model_loading peft_autocast_adapter_dtype low_cpu_mem_usage",
    ),
    **idle(
        "sequences have one length, and padding is never part of the loss",
        "eval_batch_size pad_to_sequence_len pad_to_multiple_of eval_sample_packing eval_sequence_len "
        "sample_packing_group_size sample_packing_bin_size sample_packing_eff_est "
        "sample_packing_mp_start_method multipack_real_batches batch_flattening "
        "pretrain_multipack_buffer_size pretrain_multipack_attn streaming_multipack_buffer_size "
        "total_num_tokens total_supervised_tokens",
    ),
    **idle(
        "megalite prepares its own token files in run.folder/data",
        "dataset_prepared_path dataset_shard_idx num_dataset_shards_to_save skip_prepare_dataset "
        "dataset_keep_in_memory push_dataset_to_hub shuffle_before_merging_datasets "
        "preprocess_iterable is_preprocess fix_untrained_tokens",
    ),
    **idle(
        _REPORTS,
        "wandb_project wandb_entity wandb_watch wandb_name wandb_run_id wandb_mode wandb_log_model "
        "use_wandb use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
        "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
        "comet_experiment_key comet_mode comet_online comet_experiment_config use_otel_metrics "
        "otel_metrics_host otel_metrics_port use_trackio trackio_project_name trackio_run_name "
        "use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode "
        "swanlab_workspace profiler_steps profiler_steps_start include_tkps eval_table_size "
        "eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset "
        "bench_split save_first_step generate_samples num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
        "generation_prompt_ratio generation_do_sample lm_eval_tasks lm_eval_batch_size "
        "lm_eval_post_train lm_eval_model",
    ),
    **idle("a run stops at a loss that is not finite", "loss_watchdog_threshold loss_watchdog_patience"),
    **idle(
        "megalite launch, or a script of launch/, starts the ranks",
        "world_size ddp device device_map max_memory gpu_memory_limit use_ray ray_run_name "
        "ray_num_workers resources_per_worker fsdp_version fsdp_final_state_dict_type heads_k_stride "
        "ring_attn_func axolotl_config_path dynamic_checkpoint",
    ),
    **idle(
        "it belongs to a method that is off or refused",
        "gptq_groupsize gptq_model_v1 jagged_restart_warmup_steps jagged_restart_anneal_steps "
        "relora_prune_ratio relora_prune_method relora_cpu_offload relora_steps relora_warmup_steps "
        "loraplus_lr_embedding lisa_step_interval lisa_layers_attribute bnb_config_kwargs merge_lora "
        "merge_method adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction "
        "dion_rank_multiple_of torchdistx_path kto_desirable_weight kto_undesirable_weight trl vllm "
        "eaft_alpha eaft_k scaling_softmax_factor scaling_softmax_bias num_labels "
        "center_rewards_coefficient pose_split_on_token_ids pose_max_context_len pose_num_chunks "
        "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
        "gradio_temperature image_size image_resize_algorithm role_boundaries qgalore_rank "
        "qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits "
        "qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size "
        "spectrum_top_fraction spectrum_model_name",
    ),
}
RULES: Mapping[str, KeyRule] = {**trainer.RULES, **_TUNING, **_TRAINING, **_IDLE}
"""Key of axolotl -> its rule."""


def read(sources: Sequence[Source]) -> Account:
    """Return the account of axolotl files. Raises ConfigError for one that cannot be read."""
    files = named_files(sources, RULES)
    reading, unset = read_files(NAME, files.own, ("special_tokens",))
    deepspeed = find_deepspeed(reading, files)
    reading = answer_all(reading, unset, RULES, trainer.STRUCTURES | _LISTS)
    answer_companions(reading, files, deepspeed)
    complete(reading, _fill)
    return reading.account


def _fill(reading: Reading) -> None:
    reason, account = f"{NAME}'s default", reading.account
    if not reading.has("adapter"):
        account.default("adapter.kind", "none", reason)
    kind = axolotl_data.kind_of(reading)
    account.default("data.kind", kind, "by the types of the data sets")
    if kind != "text":
        account.default("data.too_long", "drop", reason)
    if kind == "instruct":
        account.default("data.packing", "none", reason)
    if kind == "preference":
        account.default("preference.beta", 0.1, reason)
    if account.settings.get("adapter.kind") == "lora":
        for key in ("lora_r", "lora_alpha"):
            if not reading.has(key):
                reading.refuse(key, "is not set, and a LoRA needs it", "set adapter.rank and adapter.alpha")
        if "adapter.targets" not in account.settings and not reading.has("lora_target_modules"):
            reading.refuse(
                "lora_target_modules", "is not set, and a LoRA needs it", "set lora_target_linear: true"
            )
    tuning.fill_adapter_defaults(reading, {"adapter.dropout": 0.0}, reason)
    # bf16 is auto where it is left out; one that is false or null has set no precision.
    bf16_off = any(answer.key in ("bf16", "bfloat16") for answer in account.answers)
    others: dict[str, Any] = {
        "training.sequence_length": 512,
        "training.micro_batch_size": 2 if kind == "preference" else 1,
        "training.precision": "fp32" if bf16_off else "bf16",
        "optimizer.schedule": "cosine",
    }
    if "training.steps" not in account.settings:
        others["training.epochs"] = 1.0
    if not (reading.has("warmup_steps") or reading.has("warmup_ratio")):
        others["optimizer.warmup_ratio"] = 0.03
        more = "where that is more, set optimizer.warmup_steps = 100"
        account.note(f"warm-up: axolotl's default is 3% of the steps, and at most 100 steps; {more}")
    trainer_rates.fill_defaults(reading, NAME, others)
    needed = {"base_model": ("model.weights",), "datasets": ("data.source",)}
    if reading.has("pretraining_dataset"):
        del needed["datasets"]
    require(reading, needed)
