"""The keys of DeepSpeed 0.19.8, and what megalite does with each; DeepSpeed itself ignores unknown keys silently.

Sources: DeepSpeed's runtime/config.py and runtime/constants.py for the top level, the pydantic models and constants of
each block for the rest (a test compares them with the installed ones). A block that is not listed may hold any key.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

VERSION = "0.19.8"


@dataclass(frozen=True)
class KeyEffect:
    """The treatment of a key, and of the keys below a block that have no entry of their own.

    keys: the names of those keys, separated by spaces. of_deepspeed: False for a key that DeepSpeed ignores too.
    """

    _: KW_ONLY
    keys: str = ""
    of_deepspeed: bool = True


class Read(KeyEffect):
    """The value becomes a setting of megalite, or another key of DeepSpeed."""


class Implied(KeyEffect):
    """megalite always does what the key asks for: an export has whole weights, any optimizer may be used."""


class Silent(KeyEffect):
    """No effect and no note: the block above has one, or does nothing in DeepSpeed while its refused key is off."""


@dataclass(frozen=True)
class PassedOn(KeyEffect):
    """DeepSpeed is handed the value unchanged. kind: the kind of value, a word of values.py.

    idle_under_zero_1: why the key has no effect at stage 1: a note as that of Idle; empty: it has one.
    """

    kind: str
    idle_under_zero_1: str = ""


@dataclass(frozen=True)
class Idle(KeyEffect):
    """No effect, and a note with the reason unless the key is switched off."""

    reason: str


@dataclass(frozen=True)
class Refused(KeyEffect):
    """A problem, unless the value is one of the harmless ones."""

    remedy: str
    harmless: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Removed(KeyEffect):
    """DeepSpeed no longer has the key and refuses to start: a problem unless the key is switched off."""

    remedy: str


_REPORTS = "megalite reports every step itself (monitor.every)"
_CHECKPOINTS = "megalite writes its own checkpoints"
_SUMS = "gradients are summed, and the loss is the mean over the global batch"
_OUR_SUMS = "under ZeRO 1 megalite sums the gradients itself, by all-reduce"
_ORDER = "it changes no numbers, and DeepSpeed 0.19 confuses with it where the state of a parameter is"
_LEAVES = "the models of megalite need no leaf modules"
_METRICS = "megalite reports to tensorboard, wandb, mlflow and csv (monitor.report_to)"

EFFECTS: dict[str, KeyEffect] = {
    "activation_checkpointing": Idle(
        "use training.recompute",
        keys="contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile "
        "synchronize_checkpoint_boundary",
    ),
    "aio.block_size": PassedOn("positive"),
    "aio.intra_op_parallelism": PassedOn("positive"),
    "aio.overlap_events": PassedOn("bool"),
    "aio.queue_depth": PassedOn("positive"),
    "aio.single_submit": PassedOn("bool"),
    "aio.thread_count": Idle("DeepSpeed calls it intra_op_parallelism", of_deepspeed=False),
    "aio.use_gds": Idle("megalite reads through host memory"),
    "allgather_size": Idle("use zero_optimization.allgather_bucket_size"),
    "amp": Removed("use fp16 or bf16"),
    "autotuning": Silent(
        keys="arg_mappings end_profile_step exps_dir fast max_train_batch_size max_train_micro_batch_size_per_gpu "
        "metric metric_path min_train_batch_size min_train_micro_batch_size_per_gpu model_info "
        "model_info_path mp_size num_tuning_micro_batch_sizes overwrite results_dir start_profile_step "
        "tuner_early_stopping tuner_num_trials tuner_type"
    ),
    "autotuning.enabled": Refused("remove it", (False,)),
    "bf16.bf16_master_weights_and_grads": Refused("remove it: megalite keeps fp32 master weights", (False,)),
    "bf16.bf16_optimizer_states": Refused("remove it: megalite keeps fp32 optimizer states", (False,)),
    "bf16.check_grad_overflow": Refused("remove it, and set training.nonfinite", (True,)),
    "bf16.enabled": Read(),
    "bf16.immediate_grad_update": Idle("gradients are updated once a step"),
    "bfloat16.bf16_master_weights_and_grads": Refused(
        "remove it: megalite keeps fp32 master weights", (False,)
    ),
    "bfloat16.bf16_optimizer_states": Refused("remove it: megalite keeps fp32 optimizer states", (False,)),
    "bfloat16.check_grad_overflow": Refused("remove it, and set training.nonfinite", (True,)),
    "bfloat16.enabled": Read(),
    "bfloat16.immediate_grad_update": Idle("gradients are updated once a step"),
    "checkpoint": Idle(
        _CHECKPOINTS, keys="checkpoint_serialization load_universal tag_validation use_node_local_storage"
    ),
    "checkpoint.parallel_write": Silent(keys="pipeline_stage"),
    "checkpoint.writer": Silent(
        keys="data_parallel decoupled io_buffer_double io_buffer_size io_multiplier show_statistics type"
    ),
    "comet": Idle(
        _METRICS,
        keys="api_key enabled experiment_key experiment_name mode online project samples_log_interval workspace",
    ),
    "comms_config": Idle("DeepSpeed has no such key", of_deepspeed=False),
    "comms_logger": Idle(_REPORTS, keys="debug enabled prof_all prof_ops verbose"),
    "communication_data_type": PassedOn("fp16 or bf16 or fp32"),
    "compile": Idle(
        "use training.compile",
        keys="autoep_non_moe debug_log double_buffer free_activation free_activation_threshold "
        "keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory "
        "offload_opt_states offload_parameters passes symmetric_memory sync_after_allgather sync_after_reduce "
        "sync_before_allgather sync_before_reduce",
    ),
    "compile.deepcompile": Refused("remove it, and set training.compile", (False,)),
    "compression_training": Removed("remove it: the model trains uncompressed"),
    "csv_monitor": Read(keys="enabled job_name output_path"),
    "curriculum_learning": Removed("remove it"),
    "data_efficiency": Silent(keys="seed"),
    "data_efficiency.data_routing": Silent(keys="enabled random_ltd"),
    "data_efficiency.data_sampling": Silent(
        keys="curriculum_learning dynamic_batching enabled num_epochs num_workers pin_memory"
    ),
    "data_efficiency.enabled": Refused("remove it", (False,)),
    "data_parallel_size": Refused("remove it, and set parallel.data"),
    "data_types.buffer_dtype": Refused("remove it, and set training.precision"),
    "data_types.grad_accum_dtype": Read(),
    "data_types.keep_in_fp32_modules": Refused("remove it, and set training.precision", ([],)),
    "data_types.param_dtype": Refused("remove it, and set training.precision"),
    "dataloader_drop_last": Idle("megalite loads the data"),
    "datastates_ckpt": Idle(_CHECKPOINTS),
    "disable_allgather": Idle("DeepSpeed does not use it"),
    "disable_python_gc": Idle("DeepSpeed does not run the steps"),
    "dump_state": Idle(_REPORTS),
    "eigenvalue": Removed("remove it"),
    "elasticity": Removed("set the batch sizes themselves"),
    "expert_parallel": Refused("remove it, and set parallel.expert"),
    "flops_profiler": Idle(
        _REPORTS,
        keys="detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules",
    ),
    "fp16.auto_cast": Idle("the inputs are token ids"),
    "fp16.consecutive_hysteresis": Refused("use false", (False,)),
    "fp16.enabled": Read(),
    "fp16.fp16_master_weights_and_grads": Refused("remove it: megalite keeps fp32 master weights", (False,)),
    "fp16.hysteresis": Read(),
    "fp16.initial_scale_power": Read(),
    "fp16.loss_scale": Read(),
    "fp16.loss_scale_window": Read(),
    "fp16.min_loss_scale": Read(),
    "gradient_accumulation_steps": Read(),
    "gradient_allreduce_op": Refused('use "mean": the loss is the mean over the global batch', ("mean",)),
    "gradient_clipping": Read(),
    "gradient_predivide_factor": Idle(_SUMS),
    "graph_harvesting": Removed("remove it"),
    "hybrid_engine": Silent(
        keys="enable_cuda_graph inference_tp_size max_out_tokens pin_parameters release_inference_cache "
        "tp_gather_partition_size"
    ),
    "hybrid_engine.enabled": Refused("remove it", (False,)),
    "log_level": Idle(_REPORTS),
    "managed_gradient_accumulation": Idle("megalite sums the micro batches"),
    "memory_breakdown": Idle(_REPORTS),
    "monitor_config": Idle("DeepSpeed has no such key", of_deepspeed=False),
    "nebula": Removed("remove it"),
    "optimizer": Read(keys="params type"),
    "optimizer.legacy_fusion": Idle("megalite has its own AdamW"),
    "pipeline": Refused(
        "remove it, and set parallel.pipeline and parallel.schedule",
        ({},),
        keys="activation_checkpoint_interval grad_partitioned partition pipe_partitioned seed_layers stages",
    ),
    "prescale_gradients": Idle(_SUMS),
    "progressive_layer_drop": Removed("remove it"),
    "quantize_training": Removed("remove it"),
    "scheduler": Read(keys="params type"),
    "seq_parallel_communication_data_type": Idle("use parallel.sequence"),
    "sequence_parallel_size": Refused("remove it, and set parallel.context", (1,)),
    "sparse_attention": Removed("remove it"),
    "sparse_gradients": Removed("remove it"),
    "steps_per_print": Idle(_REPORTS),
    "tensor_parallel": Silent(
        keys="dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config preset_model "
        "replace_with_kernel_inject tp_overlap_comm vocab_parallel_ce_backend vocab_parallel_lm_head"
    ),
    "tensor_parallel.autotp_size": Refused("remove it, and set parallel.tensor", (0,)),
    "tensor_parallel.tensor_parallel": Refused("remove it, and set parallel.tensor", ({},)),
    "tensor_parallel.tp": Refused("remove it, and set parallel.tensor", ({},)),
    "tensorboard": Read(keys="enabled job_name output_path"),
    "timers": Idle(_REPORTS),
    "timers.throughput": Silent(keys="enabled synchronized"),
    "torch_autocast": Silent(keys="dtype lower_precision_safe_modules"),
    "torch_autocast.enabled": Refused("remove it, and set training.precision", (False,)),
    "train_batch_size": Read(),
    "train_micro_batch_size_per_gpu": Read(),
    "use_data_before_expert_parallelism": Idle("megalite lays out the ranks of experts"),
    "vocabulary_size": Idle("the vocabulary is the tokenizer's"),
    "wall_clock_breakdown": Idle(_REPORTS),
    "wandb": Read(keys="enabled group project team"),
    "weight_quantization": Refused("remove it", ({},)),
    "zero_allow_untested_optimizer": Implied(),
    "zero_force_ds_cpu_optimizer": Idle("use deepspeed.native_optimizer"),
    "zero_optimization.allgather_bucket_size": PassedOn("positive"),
    "zero_optimization.allgather_partitions": PassedOn("bool"),
    "zero_optimization.allgather_sequential": PassedOn("bool"),
    "zero_optimization.compute_grad_norm": Refused("remove it: every step reports the norm", (True,)),
    "zero_optimization.contiguous_gradients": PassedOn("bool", idle_under_zero_1=_OUR_SUMS),
    "zero_optimization.cpu_offload": Read(),
    "zero_optimization.cpu_offload_param": Read(),
    "zero_optimization.cpu_offload_use_pin_memory": Idle(
        "use pin_memory in offload_optimizer or offload_param"
    ),
    "zero_optimization.elastic_checkpoint": Idle(_CHECKPOINTS),
    "zero_optimization.enable_sanity_checks": PassedOn("bool"),
    "zero_optimization.gather_16bit_weights_on_model_save": Implied(),
    "zero_optimization.ignore_unused_parameters": PassedOn("bool"),
    "zero_optimization.leaf_module": Idle(_LEAVES, keys="classes name_suffixes names"),
    "zero_optimization.legacy_stage1": Refused("use false", (False,)),
    "zero_optimization.load_from_fp32_weights": Idle(_CHECKPOINTS),
    "zero_optimization.log_trace_cache_warnings": PassedOn("bool"),
    "zero_optimization.max_live_parameters": PassedOn("count"),
    "zero_optimization.max_reuse_distance": PassedOn("count"),
    "zero_optimization.memory_efficient_linear": PassedOn("bool"),
    "zero_optimization.mics_hierarchical_params_gather": Removed("remove it"),
    "zero_optimization.mics_shard_size": Removed("remove it"),
    "zero_optimization.model_persistence_threshold": PassedOn("count"),
    "zero_optimization.module_granularity_threshold": Idle(_LEAVES),
    "zero_optimization.offload_optimizer.buffer_count": PassedOn("positive"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Idle(
        "DeepSpeed uses it only with super_offload"
    ),
    "zero_optimization.offload_optimizer.device": PassedOn("text"),
    "zero_optimization.offload_optimizer.fast_init": PassedOn("bool"),
    "zero_optimization.offload_optimizer.nvme_path": PassedOn("text"),
    "zero_optimization.offload_optimizer.pin_memory": PassedOn("bool"),
    "zero_optimization.offload_optimizer.pipeline_read": PassedOn("bool"),
    "zero_optimization.offload_optimizer.pipeline_write": PassedOn("bool"),
    "zero_optimization.offload_optimizer.ratio": Refused("use 1.0", (1,)),
    "zero_optimization.offload_optimizer.super_offload": Refused("use false", (False,)),
    "zero_optimization.offload_param.buffer_count": PassedOn("positive"),
    "zero_optimization.offload_param.buffer_size": PassedOn("count"),
    "zero_optimization.offload_param.device": PassedOn("text"),
    "zero_optimization.offload_param.max_in_cpu": PassedOn("count"),
    "zero_optimization.offload_param.nvme_path": PassedOn("text"),
    "zero_optimization.offload_param.pin_memory": PassedOn("bool"),
    "zero_optimization.overlap_comm": PassedOn("bool"),
    "zero_optimization.override_module_apply": PassedOn("bool"),
    "zero_optimization.param_persistence_threshold": PassedOn("count"),
    "zero_optimization.parameter_alignment": PassedOn("bool"),
    "zero_optimization.pipeline_loading_checkpoint": Idle(_CHECKPOINTS),
    "zero_optimization.prefetch_bucket_size": PassedOn("count"),
    "zero_optimization.reduce_bucket_size": PassedOn("positive"),
    "zero_optimization.reduce_scatter": PassedOn("bool", idle_under_zero_1=_OUR_SUMS),
    "zero_optimization.round_robin_gradients": Idle(_ORDER),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Idle("the optimizer is not Muon"),
    "zero_optimization.stage": Read(),
    "zero_optimization.stage3_allgather_sequential": PassedOn("bool"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Implied(),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Implied(),
    "zero_optimization.stage3_max_live_parameters": PassedOn("count"),
    "zero_optimization.stage3_max_reuse_distance": PassedOn("count"),
    "zero_optimization.stage3_model_persistence_threshold": PassedOn("count"),
    "zero_optimization.stage3_module_granularity_threshold": Idle(_LEAVES),
    "zero_optimization.stage3_param_persistence_threshold": PassedOn("count"),
    "zero_optimization.stage3_prefetch_bucket_size": PassedOn("count"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": PassedOn("bool"),
    "zero_optimization.sub_group_size": PassedOn("count"),
    "zero_optimization.use_all_reduce_for_fetch_params": PassedOn("bool"),
    "zero_optimization.use_multi_rank_bucket_allreduce": PassedOn("bool", idle_under_zero_1=_OUR_SUMS),
    "zero_optimization.zenflow": Refused(
        "remove it",
        keys="auto_ratio full_warm_up_rounds offload overlap_step pt_reserved_cores_perc select_interval "
        "select_strategy topk_ratio update_interval",
    ),
    "zero_optimization.zero_hpz_partition_size": Refused("use 1", (0, 1)),
    "zero_optimization.zero_quantized_gradients": Refused("use false", (False,)),
    "zero_optimization.zero_quantized_nontrainable_weights": Refused("use false", (False,)),
    "zero_optimization.zero_quantized_weights": Refused("use false", (False,)),
    "zero_optimization.zeropp_loco_param": Removed("remove it"),
}


def _blocks() -> dict[str, tuple[str, ...]]:
    names: dict[str, set[str]] = {}
    for path in _paths():
        while path:
            block, _, name = path.rpartition(".")
            names.setdefault(block, set()).add(name)
            path = block
    return {block: tuple(sorted(names[block])) for block in sorted(names)}


def _paths() -> Iterator[str]:
    for path, effect in EFFECTS.items():
        if effect.of_deepspeed and not isinstance(effect, Removed):
            yield from (path, *(f"{path}.{name}" for name in effect.keys.split()))


KEYS = _blocks()
"""Block -> the names of the keys that DeepSpeed reads in it; "": the top level."""
