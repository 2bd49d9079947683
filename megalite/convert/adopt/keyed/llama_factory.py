"""LLaMA-Factory: YAML files with its own keys beside those of TrainingArguments.

Keys and defaults are those of src/llamafactory/hparams of hiyouga/LLaMA-Factory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.companions import answer_companions, find_deepspeed, named_files
from megalite.convert.adopt.keyed import llama_factory_data, trainer, trainer_rates, tuning
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
    whole,
)
from megalite.convert.adopt.sources import Source

NAME = "LLaMA-Factory"
_LISTS = frozenset(
    {"lora_target", "additional_target", "dataset", "eval_dataset", "interleave_probs"}
    | {"add_tokens", "add_special_tokens", "adapter_name_or_path"}
)
_STAGES = {"sft": "instruct", "pt": "text", "dpo": "preference"}
_MODEL = "train another model, or keep LLaMA-Factory for this one"


def _read_batch(reading: Reading, key: str, value: Any) -> None:
    tuning.read_micro_batch(reading, key, value, pairs=reading.get("stage") == "dpo")


def _read_loss(reading: Reading, key: str, value: Any) -> None:
    if reading.get("stage") != "dpo":
        reading.no_effect(key, "the stage is not dpo")
    elif key == "pref_loss" and value in ("sigmoid", "ipo"):
        reading.take(key, {"preference.loss": value})
    elif key == "pref_loss":
        reading.refuse(key, "megalite has DPO's sigmoid and ipo", "use one of them")
    else:
        name = "beta" if key == "pref_beta" else "label_smoothing"
        reading.take(key, {f"preference.{name}": number(value)})


def _read_adapter(reading: Reading, key: str, value: Any) -> None:
    paths = tuning.names(value)
    if len(paths) > 1:
        reading.refuse(
            key, "megalite goes on from one adapter", "merge the others first (megalite convert export)"
        )
    else:
        reading.take(key, {"adapter.path": paths[0]})


def _read_tokens(reading: Reading, key: str, value: Any) -> None:
    tuning.read_tokens(reading, key, value, adapter=reading.get("finetuning_type", "lora") == "lora")


_LORA: Mapping[str, KeyRule] = {
    "lora_rank": Take("adapter.rank", whole),
    "lora_alpha": tuning.ALPHA,
    "lora_dropout": Take("adapter.dropout", number),
    "lora_target": Together(tuning.read_targets),
    "additional_target": Together(tuning.read_modules_to_save),
    "use_rslora": Switch({"adapter.rslora": True}),
    "use_dora": Switch({"adapter.dora": True}),
    "adapter_name_or_path": Together(_read_adapter),
}
_TUNING: Mapping[str, KeyRule] = {
    "model_name_or_path": Together(tuning.read_model),
    "model_revision": NoEffect("it is part of model.weights"),
    "stage": WordsOf({name: {"data.kind": kind} for name, kind in _STAGES.items()}, "use pt, sft or dpo"),
    "finetuning_type": WordsOf(
        {"lora": {"adapter.kind": "lora"}, "full": {"adapter.kind": "none"}}, "use lora or full"
    ),
    **tuning.of_lora(_LORA, "finetuning_type", ("lora",), "lora"),
    "per_device_train_batch_size": Together(_read_batch),
    "pref_beta": Together(_read_loss),
    "pref_loss": Together(_read_loss),
    "dpo_label_smoothing": Together(_read_loss),
    "disable_gradient_checkpointing": Switch({"training.recompute": "none"}, {"training.recompute": "full"}),
    "add_tokens": Together(_read_tokens),
    "add_special_tokens": Together(_read_tokens),
    "train_from_scratch": Refuse(
        "model.weights starts from weights", "set model.hf_config instead in run.toml"
    ),
    "quantization_bit": Refuse("megalite trains no base of 4 or 8 bits", tuning.BASE_REMEDY, ()),
    "rope_scaling": Refuse("config.json has the scaling", "set model.rope_type in run.toml", ("none", *OFF)),
    "loraplus_lr_ratio": Refuse("A and B have one learning rate here", "leave it out", (1, 1.0)),
    "early_stopping_steps": Together(trainer_rates.read_patience),
    "freeze_trainable_layers": NoEffect("it belongs to finetuning_type: freeze"),
    "ref_model": Refuse("the reference is the model before its tuning", "leave it out", ()),
    **refused(
        "megalite does not have it",
        _MODEL,
        "pissa_init create_new_adapter shift_attn mixture_of_depths moe_aux_loss_coef "
        "upcast_layernorm use_llama_pro use_adam_mini use_galore use_apollo use_badam use_dft_loss "
        "use_asft_loss use_eaft_loss pref_ftx pref_bco_weight ld_alpha pure_bf16 fp8 use_mca "
        "use_megatron_bridge use_hyper_parallel use_kt ref_model_adapters reward_model resize_vocab "
        "new_special_tokens_config use_fp8 moe_grouped_gemm",
        (False, 0, "none", [], {}),
    ),
    **refused(
        "megalite has no experts and no context parallelism",
        "leave it out",
        "expert_model_parallel_size context_parallel_size",
        (1,),
    ),
    "use_muon": Refuse(
        "megalite's muon has its own rates", 'set optimizer.name = "muon" and its rate in run.toml'
    ),
    **idle(
        "it belongs to a method that is off or refused",
        "freeze_trainable_modules freeze_extra_modules loraplus_lr_embedding pissa_iter pissa_convert "
        "module_dropout oft_rank oft_block_size oft_target kto_chosen_weight kto_rejected_weight "
        "simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards "
        "ref_model_quantization_bit reward_model_adapters reward_model_quantization_bit "
        "reward_model_type galore_target galore_rank galore_update_interval galore_scale "
        "galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval "
        "apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise "
        "apollo_scale_front badam_mode badam_start_block badam_switch_mode badam_switch_interval "
        "badam_update_ratio badam_mask_mode badam_verbose asft_alpha eaft_alpha megatron_bridge_args "
        "hyper_parallel_args hyper_parallel_cp_size freeze_vision_tower freeze_multi_modal_projector "
        "freeze_language_model quantization_method quantization_type double_quantization "
        "quantization_device_map fp8_backend fp8_enable_fsdp_float8_all_gather kt_cpu_activation "
        "kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts "
        "kt_lora_expert_num kt_lora_expert_intermediate_size kt_config moe_token_dispatcher_type "
        "init_special_tokens",
    ),
    **idle(
        "only text is read",
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
        "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate media_dir",
    ),
}
_PARALLEL: Mapping[str, KeyRule] = {
    "tensor_model_parallel_size": Take("parallel.tensor", whole),
    "pipeline_model_parallel_size": Take("parallel.pipeline", whole),
    "sequence_parallel": Switch({"parallel.sequence": True}),
    "recompute_granularity": WordsOf(
        {"full": {"training.recompute": "full"}, "selective": {"training.recompute": "selective"}}, "use full"
    ),
    "use_distributed_optimizer": Switch({"deepspeed.zero_optimization.stage": 1}),
    **idle(
        "megalite chooses its operators and their overlap itself",
        "bias_activation_fusion apply_rope_fusion overlap_param_gather overlap_grad_reduce "
        "masked_softmax_fusion cross_entropy_loss_fusion recompute_method recompute_num_layers "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    ),
}
_RUN: Mapping[str, KeyRule] = {
    **idle(
        "megalite reads Hugging Face's folders with the tokenizers library, and runs no code of theirs",
        "trust_remote_code use_fast_tokenizer split_special_tokens low_cpu_mem_usage cache_dir "
        "adapter_folder hf_hub_token ms_hub_token om_hub_token offload_folder",
    ),
    **idle(
        "megalite chooses its operators itself",
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_reentrant_gc "
        "upcast_lmhead_output use_v1_kernels print_param_status",
    ),
    **idle(
        "megalite writes metrics.jsonl",
        "plot_loss compute_accuracy include_effective_tokens_per_second use_swanlab swanlab_project "
        "swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
        "swanlab_lark_webhook_url swanlab_lark_secret enable_torch_profiler profiler_output_dir "
        "profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat "
        "profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
    ),
    **idle(
        "megalite launch, or a script of launch/, starts the ranks",
        "ray_num_workers ray_init_kwargs ray_run_name ray_storage_path ray_storage_filesystem "
        "resources_per_worker placement_strategy master_addr master_port",
    ),
    **idle(
        "megalite generate, serve and evaluate use the model, megalite convert export writes it",
        "infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager "
        "vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size "
        "sglang_config sglang_lora_backend export_dir export_size export_device "
        "export_quantization_bit export_quantization_dataset export_quantization_nsamples "
        "export_quantization_maxlen export_legacy_format export_hub_model_id do_sample temperature "
        "top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty "
        "skip_special_tokens eval_num_beams",
    ),
}
RULES: Mapping[str, KeyRule] = {**trainer.RULES, **_TUNING, **_PARALLEL, **llama_factory_data.RULES, **_RUN}
"""Key of LLaMA-Factory or TrainingArguments -> its rule."""


def read(sources: Sequence[Source]) -> Account:
    """Return the account of LLaMA-Factory files. Raises ConfigError for one that cannot be read."""
    files = named_files(sources, RULES)
    reading, unset = read_files(NAME, files.own, ())
    deepspeed = find_deepspeed(reading, files)
    reading = answer_all(reading, unset, RULES, trainer.STRUCTURES | _LISTS)
    answer_companions(reading, files, deepspeed)
    complete(reading, _fill)
    return reading.account


def _fill(reading: Reading) -> None:
    reason = f"{NAME}'s default"
    account = reading.account
    for setting, value in (
        ("data.kind", "instruct"),
        ("adapter.kind", "lora"),
        ("training.sequence_length", 2048),
    ):
        account.default(setting, value, reason)
    kind = account.settings["data.kind"]
    if kind == "instruct":
        account.default("data.packing", "none", reason)
    if kind == "preference":
        account.default("preference.beta", 0.1, reason)
    rank = account.settings.get("adapter.rank", 8)
    defaults = {
        "adapter.rank": 8,
        "adapter.alpha": 2.0 * rank,
        "adapter.dropout": 0.0,
        "adapter.targets": "all",
    }
    tuning.fill_adapter_defaults(reading, defaults, reason)
    size = 16 if kind == "preference" else 8
    others = {"training.micro_batch_size": size, "training.recompute": "full"}
    trainer_rates.fill_defaults(reading, NAME, others)
    require(reading, {"model_name_or_path": ("model.weights",), "dataset": ("data.source",)})
