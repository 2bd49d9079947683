"""Hugging Face's TrainingArguments, as JSON; LLaMA-Factory's files have the same keys beside their own.

Keys and defaults are those of transformers 5, with the names that version 4 had.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.companions import answer_companions, find_deepspeed, named_files
from megalite.convert.adopt.continued import answer_output, answer_resume
from megalite.convert.adopt.keyed import trainer_rates
from megalite.convert.adopt.keyed.keyed_file import answer_all, idle, read_files, refused
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

NAME = "Hugging Face Trainer"
_REPORTS = "megalite writes metrics.jsonl, and TensorBoard with monitor.tensorboard"
_LOADING = "megalite loads batches itself (data.workers, data.loader_workers, data.prefetch)"
_RANKS = "megalite has its own ranks and collectives"
_LATEST = (True, "true", "auto", "latest")
_HUB = "a run uploads nothing: upload run.folder/export"


def _read_precision(reading: Reading, key: str, value: Any) -> None:
    """bf16, fp16: the weights are kept in fp32 there and here."""
    on = value == "full" or value == "auto" or switch(value)
    if not on:
        reading.no_effect(key, "it is off")
    elif value == "auto":
        reading.take(key, {"training.precision": "auto"})
    else:
        reading.take(key, {"training.precision": key}, "with fp32 master weights")


def _read_tf32(reading: Reading, key: str, value: Any) -> None:
    if reading.get("bf16", False) not in OFF or reading.get("fp16", False) not in OFF:
        reading.no_effect(key, "products of bf16 and fp16 do not have it")
    else:
        reading.take(key, {"training.tf32": switch(value)})


_SHARDING = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3}


def _read_fsdp(reading: Reading, key: str, value: Any) -> None:
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    words = ["full_shard"] if words is True else words if isinstance(words, list) else []
    stage = max((_SHARDING.get(str(word), 0) for word in words), default=0)
    if not stage:
        reading.no_effect(key, "nothing is sharded")
        return
    settings: dict[str, Any] = {"deepspeed.zero_optimization.stage": stage}
    if "offload" in words:
        settings["deepspeed.zero_optimization.offload_optimizer.device"] = "cpu"
    reading.change(key, settings, "ZeRO shards what FSDP shards; the numbers are the same")


def _read_fsdp_table(reading: Reading, key: str, value: Any) -> None:
    """fsdp_config: without the word list beside it, FSDP2's sharding by itself."""
    if reading.has("fsdp") or not isinstance(value, Mapping) or not value:
        reading.no_effect(key, "fsdp decides" if value else "it is empty")
        return
    stage = 2 if value.get("reshard_after_forward") is False else 3
    settings: dict[str, Any] = {"deepspeed.zero_optimization.stage": stage}
    if value.get("offload_params") is True:
        settings["deepspeed.zero_optimization.offload_optimizer.device"] = "cpu"
    reading.change(key, settings, "ZeRO shards what FSDP shards; the numbers are the same")


def read_resume(reading: Reading, key: str, value: Any) -> None:
    output = reading.get("output_dir")
    if value in OFF or (value in _LATEST and output is None):
        reading.take(key, {}, "megalite resumes the latest checkpoint of run.folder")
    else:
        answer_resume(reading, key, text(output if value in _LATEST else value), output)


def _read_grouping(reading: Reading, key: str, value: Any) -> None:
    if value in ("random", *OFF):
        reading.take(key, {}, "sequences are drawn at random")
    elif value in (True, "group_by_length"):
        reading.change(
            key, {}, 'set data.packing = "none" and data.length_buckets for batches of similar lengths'
        )
    else:
        reading.refuse(key, "megalite draws at random, or in order with data.shuffle = false", "use random")


_BATCH: Mapping[str, KeyRule] = {
    "per_device_train_batch_size": Take("training.micro_batch_size", whole),
    "per_gpu_train_batch_size": Take("training.micro_batch_size", whole),
    "gradient_accumulation_steps": Take("training.micro_batches", whole),
    "num_train_epochs": Together(trainer_rates.read_length),
    "max_steps": Together(trainer_rates.read_length),
    "bf16": Together(_read_precision),
    "fp16": Together(_read_precision),
    "tf32": Together(_read_tf32),
    "gradient_checkpointing": Switch({"training.recompute": "full"}, {"training.recompute": "none"}),
    "activation_checkpointing": Switch({"training.recompute": "full"}, {"training.recompute": "none"}),
    "torch_compile": Switch({"training.compile": True}, {"training.compile": False}),
    "label_smoothing_factor": Take("training.label_smoothing", number),
    "neftune_noise_alpha": Refuse("megalite adds no noise to the embedding", "leave it out", (0, *OFF)),
    "auto_find_batch_size": Refuse("megalite keeps the batch size", "set per_device_train_batch_size"),
    "average_tokens_across_devices": Refuse(
        "megalite's loss is the mean over the tokens of all ranks", "set it to true", (True,)
    ),
    "use_cpu": Refuse(
        "megalite takes the accelerator that it finds", "hide it (CUDA_VISIBLE_DEVICES)", numbers=False
    ),
}
_OPTIMIZER: Mapping[str, KeyRule] = {
    "learning_rate": Take("optimizer.learning_rate", number),
    "lr_scheduler_type": trainer_rates.SCHEDULE,
    "lr_scheduler": trainer_rates.SCHEDULE,
    "lr_scheduler_kwargs": Together(trainer_rates.read_schedule_arguments),
    "warmup_steps": Together(trainer_rates.read_warmup),
    "warmup_ratio": Together(trainer_rates.read_warmup),
    "optim": Together(trainer_rates.read_optimizer),
    "optim_args": Refuse("megalite's optimizers have no such arguments", "set [optimizer]", ("", {}, False)),
    "optim_target_modules": Refuse(
        "megalite's optimizers update every matrix", "leave it out", ("", [], False)
    ),
    "weight_decay": Take("optimizer.weight_decay", number, "norms and biases have none, as there"),
    "adam_beta1": Together(trainer_rates.read_betas),
    "adam_beta2": Together(trainer_rates.read_betas),
    "adam_epsilon": Together(trainer_rates.read_epsilon),
    "max_grad_norm": Take("optimizer.gradient_clipping", number),
}
_RUN: Mapping[str, KeyRule] = {
    "output_dir": Together(answer_output),
    "seed": Take("run.seed", whole, "the draws are megalite's own"),
    "logging_steps": Together(trainer_rates.read_interval),
    "eval_steps": Together(trainer_rates.read_interval),
    "save_steps": Together(trainer_rates.read_interval),
    "eval_strategy": Together(trainer_rates.read_strategy),
    "evaluation_strategy": Together(trainer_rates.read_strategy),
    "save_strategy": Together(trainer_rates.read_strategy),
    "save_total_limit": Take("checkpoint.keep_last", whole),
    "load_best_model_at_end": Switch({"checkpoint.best": True, "checkpoint.export": "best"}),
    "metric_for_best_model": WordsOf(
        {"loss": {}, "eval_loss": {}}, "the best checkpoint has the lowest loss"
    ),
    "greater_is_better": Refuse("the best checkpoint has the lowest loss", "set it to false", numbers=False),
    "eval_on_start": Switch({"validation.at_start": True}),
    "resume_from_checkpoint": Together(read_resume),
    "deepspeed": NoEffect("DeepSpeed is not used"),
    "fsdp": Together(_read_fsdp),
    "fsdp_config": Together(_read_fsdp_table),
    "group_by_length": Together(_read_grouping),
    "train_sampling_strategy": Together(_read_grouping),
    "save_only_model": Refuse("megalite's checkpoints are whole", "set it to false", numbers=False),
    "parallelism_config": Refuse("megalite reads no ParallelismConfig", "set [parallel]", ({},)),
    "ignore_data_skip": Refuse("a resumed run goes on with the next samples", "set it to false"),
    **refused(
        "megalite does not run it", "leave it out", "debug jit_mode_eval use_mps_device", ("", [], False)
    ),
    **idle("the draws of a run follow from run.seed", "data_seed full_determinism"),
    **idle(
        "validation has the micro batches of training", "per_device_eval_batch_size per_gpu_eval_batch_size"
    ),
    **idle(
        _REPORTS,
        "logging_strategy logging_first_step logging_dir log_on_each_node logging_nan_inf_filter "
        "log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id "
        "trackio_bucket_id trackio_static_space_id include_num_input_tokens_seen "
        "include_tokens_per_second skip_memory_metrics",
    ),
    **idle(
        "validation is the loss on data.validation or data.split",
        "eval_delay prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics "
        "bf16_full_eval fp16_full_eval predict_with_generate generation_max_length "
        "generation_num_beams generation_config sortish_sampler",
    ),
    **idle(
        _LOADING,
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order remove_unused_columns label_names length_column_name past_index "
        "dispatch_batches split_batches",
    ),
    **idle(
        _RANKS,
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout local_rank _n_gpu n_gpu tpu_num_cores tpu_metrics_debug "
        "mp_parameters accelerator_config fsdp_min_num_params "
        "fsdp_transformer_layer_cls_to_wrap no_cuda use_ipex ray_scope xpu_backend",
    ),
    **idle(
        _HUB,
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision push_to_hub_token push_to_hub_model_id push_to_hub_organization",
    ),
    **idle(
        "megalite chooses its operators itself",
        "use_liger_kernel liger_kernel_config use_cache torch_compile_backend torch_compile_mode "
        "torchdynamo half_precision_backend fp16_backend fp16_opt_level torch_empty_cache_steps "
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
    ),
    **idle(
        "megalite's checkpoints are published whole, by all ranks",
        "save_on_each_node save_safetensors enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint overwrite_output_dir",
    ),
    **idle("megalite train trains, megalite evaluate measures", "do_train do_eval do_predict"),
}
STRUCTURES = frozenset({"lr_scheduler_kwargs", "fsdp", "fsdp_config", "deepspeed"})
"""The keys that may be lists or tables."""
RULES: Mapping[str, KeyRule] = {**_BATCH, **_OPTIMIZER, **_RUN}
"""Key of TrainingArguments -> its rule."""


def read(sources: Sequence[Source]) -> Account:
    """Return the account of a file of TrainingArguments. Raises ConfigError for one that cannot be read."""
    files = named_files(sources, RULES)
    reading, unset = read_files(NAME, files.own, ())
    deepspeed = find_deepspeed(reading, files)
    reading = answer_all(reading, unset, RULES, STRUCTURES)
    answer_companions(reading, files, deepspeed)
    trainer_rates.fill_defaults(reading, NAME, {"training.micro_batch_size": 8})
    for key, ours in (("model", "model.weights"), ("train_dataset", "data.source")):
        remedy = f"set {ours} in run.toml"
        reading.refuse(key, "is an argument of Trainer in Python, not of this file", remedy)
    reading.refuse(
        "max_length", "is set where the data are tokenized", "set training.sequence_length in run.toml"
    )
    return reading.account
