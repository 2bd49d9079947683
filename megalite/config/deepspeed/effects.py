"""The effect of each of DeepSpeed's keys in megalite: read, passed on, without effect, or refused.

An entry for a block counts for all keys below it that have none of their own.
"""

from collections.abc import Mapping
from typing import Any

READ = (
    "bf16.enabled",
    "bfloat16.enabled",
    "data_types.grad_accum_dtype",
    "fp16.enabled",
    "fp16.hysteresis",
    "fp16.initial_scale_power",
    "fp16.loss_scale",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "zero_optimization.stage",
)
"""Keys that become settings of megalite or other keys of DeepSpeed."""

# Keys that DeepSpeed is handed as they are -> the kind of value.
PASSED_ON: dict[str, str] = {
    "aio.block_size": "positive",
    "aio.intra_op_parallelism": "positive",
    "aio.overlap_events": "bool",
    "aio.queue_depth": "positive",
    "aio.single_submit": "bool",
    "communication_data_type": "fp16 or bf16 or fp32",
    "zero_optimization.allgather_bucket_size": "positive",
    "zero_optimization.allgather_partitions": "bool",
    "zero_optimization.allgather_sequential": "bool",
    "zero_optimization.contiguous_gradients": "bool",
    "zero_optimization.enable_sanity_checks": "bool",
    "zero_optimization.ignore_unused_parameters": "bool",
    "zero_optimization.log_trace_cache_warnings": "bool",
    "zero_optimization.max_live_parameters": "count",
    "zero_optimization.max_reuse_distance": "count",
    "zero_optimization.memory_efficient_linear": "bool",
    "zero_optimization.model_persistence_threshold": "count",
    "zero_optimization.offload_optimizer.buffer_count": "positive",
    "zero_optimization.offload_optimizer.device": "text",
    "zero_optimization.offload_optimizer.fast_init": "bool",
    "zero_optimization.offload_optimizer.nvme_path": "text",
    "zero_optimization.offload_optimizer.pin_memory": "bool",
    "zero_optimization.offload_optimizer.pipeline_read": "bool",
    "zero_optimization.offload_optimizer.pipeline_write": "bool",
    "zero_optimization.offload_param.buffer_count": "positive",
    "zero_optimization.offload_param.buffer_size": "count",
    "zero_optimization.offload_param.device": "text",
    "zero_optimization.offload_param.max_in_cpu": "count",
    "zero_optimization.offload_param.nvme_path": "text",
    "zero_optimization.offload_param.pin_memory": "bool",
    "zero_optimization.overlap_comm": "bool",
    "zero_optimization.override_module_apply": "bool",
    "zero_optimization.param_persistence_threshold": "count",
    "zero_optimization.parameter_alignment": "bool",
    "zero_optimization.prefetch_bucket_size": "count",
    "zero_optimization.reduce_bucket_size": "positive",
    "zero_optimization.reduce_scatter": "bool",
    "zero_optimization.round_robin_gradients": "bool",
    "zero_optimization.stage3_allgather_sequential": "bool",
    "zero_optimization.stage3_max_live_parameters": "count",
    "zero_optimization.stage3_max_reuse_distance": "count",
    "zero_optimization.stage3_model_persistence_threshold": "count",
    "zero_optimization.stage3_param_persistence_threshold": "count",
    "zero_optimization.stage3_prefetch_bucket_size": "count",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "bool",
    "zero_optimization.sub_group_size": "count",
    "zero_optimization.use_all_reduce_for_fetch_params": "bool",
    "zero_optimization.use_multi_rank_bucket_allreduce": "bool",
}

_REPORTS = "megalite reports every step itself (monitor.every)"
_CHECKPOINTS = "megalite writes its own checkpoints"
_SUMS = "gradients are summed, and the loss is the mean over the global batch"
_LEAVES = "the models of megalite need no leaf modules"
_METRICS = "megalite writes metrics.jsonl, and TensorBoard with monitor.tensorboard"

# Keys without effect -> why; no note where they are switched off.
IDLE: dict[str, str] = {
    "activation_checkpointing": "use training.recompute",
    "aio.thread_count": "DeepSpeed calls it intra_op_parallelism",
    "aio.use_gds": "megalite reads through host memory",
    "allgather_size": "use zero_optimization.allgather_bucket_size",
    "bf16.immediate_grad_update": "gradients are updated once a step",
    "bfloat16.immediate_grad_update": "gradients are updated once a step",
    "checkpoint": _CHECKPOINTS,
    "comet": _METRICS,
    "comms_config": "DeepSpeed has no such key",
    "comms_logger": _REPORTS,
    "compile": "use training.compile",
    "csv_monitor": _METRICS,
    "dataloader_drop_last": "megalite loads the data",
    "datastates_ckpt": _CHECKPOINTS,
    "disable_allgather": "DeepSpeed does not use it",
    "disable_python_gc": "DeepSpeed does not run the steps",
    "dump_state": _REPORTS,
    "flops_profiler": _REPORTS,
    "fp16.auto_cast": "the inputs are token ids",
    "gradient_predivide_factor": _SUMS,
    "log_level": _REPORTS,
    "managed_gradient_accumulation": "megalite sums the micro batches",
    "memory_breakdown": _REPORTS,
    "monitor_config": "DeepSpeed has no such key",
    "optimizer.legacy_fusion": "megalite has its own AdamW",
    "prescale_gradients": _SUMS,
    "seq_parallel_communication_data_type": "use parallel.sequence",
    "steps_per_print": _REPORTS,
    "tensorboard": _METRICS,
    "timers": _REPORTS,
    "use_data_before_expert_parallelism": "the models have no experts",
    "vocabulary_size": "the vocabulary is the tokenizer's",
    "wall_clock_breakdown": _REPORTS,
    "wandb": _METRICS,
    "zero_force_ds_cpu_optimizer": "use deepspeed.native_optimizer",
    "zero_optimization.cpu_offload_use_pin_memory": "use pin_memory in offload_optimizer or offload_param",
    "zero_optimization.elastic_checkpoint": _CHECKPOINTS,
    "zero_optimization.leaf_module": _LEAVES,
    "zero_optimization.load_from_fp32_weights": _CHECKPOINTS,
    "zero_optimization.module_granularity_threshold": _LEAVES,
    "zero_optimization.stage3_module_granularity_threshold": _LEAVES,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "DeepSpeed uses it only with super_offload",
    "zero_optimization.pipeline_loading_checkpoint": _CHECKPOINTS,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is not Muon",
}

IMPLIED = (
    "zero_allow_untested_optimizer",
    "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
)
"""Keys for which megalite always does what they ask for: an export has whole weights, any optimizer may be used."""

# Keys that are refused -> (values without effect, remedy).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "autotuning.enabled": ((False,), "remove it"),
    "bf16.bf16_master_weights_and_grads": ((False,), "remove it: megalite keeps fp32 master weights"),
    "bf16.bf16_optimizer_states": ((False,), "remove it: megalite keeps fp32 optimizer states"),
    "bf16.check_grad_overflow": ((True,), "remove it, and set training.nonfinite"),
    "bfloat16.bf16_master_weights_and_grads": ((False,), "remove it: megalite keeps fp32 master weights"),
    "bfloat16.bf16_optimizer_states": ((False,), "remove it: megalite keeps fp32 optimizer states"),
    "bfloat16.check_grad_overflow": ((True,), "remove it, and set training.nonfinite"),
    "compile.deepcompile": ((False,), "remove it, and set training.compile"),
    "data_efficiency.enabled": ((False,), "remove it"),
    "data_parallel_size": ((), "remove it, and set parallel.data"),
    "data_types.buffer_dtype": ((), "remove it, and set training.precision"),
    "data_types.keep_in_fp32_modules": (([],), "remove it, and set training.precision"),
    "data_types.param_dtype": ((), "remove it, and set training.precision"),
    "expert_parallel": ((), "remove it"),
    "fp16.consecutive_hysteresis": ((False,), "use false"),
    "fp16.fp16_master_weights_and_grads": ((False,), "remove it: megalite keeps fp32 master weights"),
    "gradient_allreduce_op": (("mean",), 'use "mean": the loss is the mean over the global batch'),
    "hybrid_engine.enabled": ((False,), "remove it"),
    "pipeline": (({},), "remove it, and set parallel.pipeline and parallel.schedule"),
    "sequence_parallel_size": ((1,), "remove it"),
    "tensor_parallel.autotp_size": ((0,), "remove it, and set parallel.tensor"),
    "tensor_parallel.tensor_parallel": (({},), "remove it, and set parallel.tensor"),
    "tensor_parallel.tp": (({},), "remove it, and set parallel.tensor"),
    "torch_autocast.enabled": ((False,), "remove it, and set training.precision"),
    "weight_quantization": (({},), "remove it"),
    "zero_optimization.compute_grad_norm": ((True,), "remove it: every step reports the norm"),
    "zero_optimization.legacy_stage1": ((False,), "use false"),
    "zero_optimization.offload_optimizer.ratio": ((1,), "use 1.0"),
    "zero_optimization.offload_optimizer.super_offload": ((False,), "use false"),
    "zero_optimization.zenflow": ((), "remove it"),
    "zero_optimization.zero_hpz_partition_size": ((0, 1), "use 1"),
    "zero_optimization.zero_quantized_gradients": ((False,), "use false"),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "use false"),
    "zero_optimization.zero_quantized_weights": ((False,), "use false"),
}


def is_off(value: Any) -> bool:
    """Return whether a value switches its key off: false, "auto", nothing, a block of these, `enabled` = false."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(is_off(each) for each in value.values())
    return value in (None, False, "auto", [])
