"""GPT-NeoX: one or several YAML files, hyphens or underscores, with DeepSpeed's keys among its own.

Keys and defaults are those of megatron/neox_arguments of EleutherAI/gpt-neox.
"""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from megalite.convert.adopt.account import Account
from megalite.convert.adopt.continued import answer_output
from megalite.convert.adopt.deepspeed_json import BLOCKS, NAMES, answer_keys
from megalite.convert.adopt.keyed.keyed_file import MAPPINGS, answer_all, complete, idle, read_files, refused
from megalite.convert.adopt.launchers import answer_launcher, is_hostfile
from megalite.convert.adopt.neox import model as neox_model
from megalite.convert.adopt.neox import run as neox_run
from megalite.convert.adopt.report import nested
from megalite.convert.adopt.rules import (
    Change,
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

NAME = "GPT-NeoX"
_EXTRA = "deepspeed_extra_args."
_BLOCKS = BLOCKS | {"optimizer", "optimizer.params", "deepspeed_extra_args"}
_STRUCTURES = frozenset(
    f"{kind}_data_{part}" for kind in ("train", "valid") for part in ("paths", "weights")
) | {"attention_config", "optimizer.params.betas", *NAMES}
_REPORTS = "megalite writes metrics.jsonl, and TensorBoard with monitor.tensorboard"
_KERNELS = "megalite chooses its operators itself"
_LAUNCH = "megalite launch, or a script of launch/, starts the ranks"
_DERIVED = "GPT-NeoX computes it itself"
_DATA = 'name the conversations as .jsonl with data.kind = "instruct"'
_PAIRS = 'name the pairs as .jsonl with data.kind = "preference"'
_NO_MODEL = "train another model, or keep GPT-NeoX for this one"


def _steps(value: Any) -> int:
    steps = whole(value)
    if steps < 1:
        raise ValueError(f"{value!r} is no number of steps")
    return steps


def _stages(value: Any) -> int:
    return max(1, whole(value))


def _read_dropout(reading: Reading, key: str, value: Any) -> None:
    probability = number(value)
    reading.take(key, {"model.residual_dropout": probability, "model.embedding_dropout": probability})


def _read_training_kind(reading: Reading, key: str, value: Any) -> None:
    """train_impl and dataset_impl: text or DPO."""
    if value in ("normal", "gpt2"):
        reading.take(key, {}, "text")
    elif value in ("dpo", "pairwise") and reading.get("train_impl") == "dpo":
        reading.take(key, {"data.kind": "preference"})
    else:
        reading.refuse(key, "megalite trains on text, conversations and preferences (DPO)", "leave it out")


def _read_hostfile(reading: Reading, key: str, value: Any) -> None:
    reading.account.launch.append(f"--{key} {quote(text(value))}")
    reading.take(key, {}, f"megalite launch --{key}")


def _read_ranks(reading: Reading, key: str, value: Any) -> None:
    reading.account.ranks = whole(value)
    reading.take(key, {}, "the number of ranks")


def _read_deepspeed(reading: Reading, key: str, value: Any) -> None:
    """DeepSpeed's keys among the others, all of them with the first."""
    own = {name: inner for name, inner in reading.keys.items() if RULES.get(name) is _DEEPSPEED}
    for name in [name for name in own if name.startswith(("fp16.", "bf16.enabled", "bfloat16.enabled"))]:
        if name.startswith("fp16.") and name != "fp16.enabled" and not neox_run.is_fp16(reading):
            reading.no_effect(name, "only fp16 has a loss scale")
        elif name.endswith(".enabled") and not switch(own[name]):
            reading.no_effect(name, "it is off")
        elif name == "fp16.enabled" and not neox_run.is_fp16(reading):
            reading.take(name, {"training.precision": "bf16"}, "fp16.type is bfloat16")
        else:
            continue
        del own[name]
    reading.answered.update(own)
    answer_keys(reading.account, nested(own), own, lambda path: reading.names.get(path, path))


_MODEL: Mapping[str, KeyRule] = {
    "num_layers": Take("model.num_hidden_layers", whole),
    "hidden_size": Take("model.hidden_size", whole),
    "num_attention_heads": Take("model.num_attention_heads", whole),
    "num_kv_heads": Take("model.num_key_value_heads", whole),
    "max_position_embeddings": Take("model.max_position_embeddings", whole),
    "no_weight_tying": Switch({"model.tie_word_embeddings": False}, {"model.tie_word_embeddings": True}),
    "use_bias_in_attn_linear": Switch(
        {"model.attention_bias": True, "model.attention_output_bias": True},
        {"model.attention_bias": False, "model.attention_output_bias": False},
    ),
    "use_bias_in_mlp": Switch({"model.mlp_bias": True}, {"model.mlp_bias": False}),
    "attention_dropout": Take("model.attention_dropout", number),
    "hidden_dropout": Together(_read_dropout),
    "activation": Together(neox_model.read_activation),
    "bias_gelu_fusion": Together(neox_model.read_gelu_fusion),
    "intermediate_size": Together(neox_model.read_width),
    "expansion_factor": Together(neox_model.read_width),
    "mlp_multiple_of": Together(neox_model.read_width),
    "norm": WordsOf(
        {name: {"model.norm": ours} for name, ours in neox_model.NORMS.items()}, "use layernorm or rmsnorm"
    ),
    "layernorm_epsilon": Together(neox_model.read_epsilon),
    "rms_norm_epsilon": Together(neox_model.read_epsilon),
    "use_bias_in_norms": Together(neox_model.read_norm_bias),
    "gpt_j_residual": Together(neox_model.read_blocks),
    "gpt_j_tied": Together(neox_model.read_blocks),
    "pos_emb": WordsOf(
        {"rotary": {"model.position_embedding": "rope"}, "learned": {"model.position_embedding": "learned"}},
        "use rotary or learned",
    ),
    "rotary_pct": Together(neox_model.read_rotation),
    "rotary_emb_base": Together(neox_model.read_rotation),
    "attention_config": Together(neox_model.read_attention),
    "init_method": Together(neox_model.read_initial),
    "output_layer_init_method": Together(neox_model.read_initial),
    "init_method_std": Together(neox_model.read_initial),
    "sliding_window_width": Take(
        "model.sliding_window", lambda value: whole(value) + 1, "GPT-NeoX counts the keys before the token"
    ),
    "make_vocab_size_divisible_by": NoEffect("megalite does not pad the vocabulary"),
    "sparsity_config": Refuse("megalite has no sparse attention", _NO_MODEL, ({}, [])),
    "mlp_type": Refuse(
        "an older GPT-NeoX had the key; in a newer one the activation says whether the MLP is gated",
        "remove it, and write activation: swiglu with the intermediate_size of the model",
        ("regular",),
    ),
    "num_unique_layers": Refuse("megalite does not share layers", _NO_MODEL, ()),
    "moe_num_experts": Refuse("megalite has no experts", _NO_MODEL, (0, 1)),
    "opt_pos_emb_offset": Refuse("megalite's positions begin at 0", _NO_MODEL, (0,)),
    **refused(
        "megalite has no such model",
        _NO_MODEL,
        "use_qk_layernorm soft_prompt_tuning use_mup fp16_lm_cross_entropy",
    ),
    **refused(
        "megalite computes in bf16, fp16 or fp32", "megalite has no fp8", "te_layernorm_mlp te_fp8_mha te_mha"
    ),
    **idle(
        _KERNELS,
        "layernorm_fusion rmsnorm_fusion use_flashattn_swiglu "
        "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion bias_dropout_fusion "
        "rope_fusion fused_kernels_build_path te_columnparallel te_rowparallel "
        "mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion "
        "output_layer_parallelism onnx_safe",
    ),
    **idle(
        "megalite computes the softmax in fp32", "attention_softmax_in_fp32 apply_query_key_layer_scaling"
    ),
    **idle(
        "it belongs to a kind of model, norm or experts that is off or refused",
        "scalenorm_epsilon rpe_num_buckets rpe_max_distance param_sharing_style gmlp_attn_dim "
        "mamba_selective_fp32_params mamba_use_bias_in_conv mamba_use_bias_in_linears dim_att "
        "head_size ffn_dim moe_expert_interval moe_top_k moe_router_type moe_lbl_in_fp32 "
        "moe_jitter_eps moe_aux_loss_coeff expert_interval te_fp8_format te_fp8_wgrad "
        "te_fp8_amax_history_len te_fp8_amax_compute_algo te_fp8_margin coord_check save_base_shapes "
        "base_shapes_file mup_init_scale mup_attn_temp mup_output_temp mup_embedding_mult "
        "mup_rp_embedding_mult mup_width_scale",
    ),
    **idle(
        "every initial weight is drawn on the device that holds it", "use_cpu_initialization lazy_mpu_init"
    ),
    **idle("megalite computes the rotary frequencies from model.rope_theta", "rotary_save_freqs_buffer"),
}
_TRAINING: Mapping[str, KeyRule] = {
    "seq_length": Take("training.sequence_length", whole),
    "precision": WordsOf(
        {
            "fp16": {"training.precision": "fp16"},
            "bfloat16": {"training.precision": "bf16"},
            "fp32": {"training.precision": "fp32"},
        },
        "use fp16, bfloat16 or fp32",
    ),
    "train_batch_size": Take("training.global_batch_size", whole),
    "train_micro_batch_size_per_gpu": Take("training.micro_batch_size", whole),
    "gradient_accumulation_steps": Take("training.micro_batches", whole),
    "gas": Together(neox_run.read_gas),
    "train_iters": Take("training.steps", _steps),
    "train_epochs": Take("training.epochs", number),
    "checkpoint_activations": Switch({"training.recompute": "full"}, {"training.recompute": "none"}),
    "data_types.grad_accum_dtype": WordsOf(
        {
            "fp32": {"training.accumulation": "fp32"},
            "bf16": {"training.accumulation": "model"},
            "fp16": {"training.accumulation": "model"},
        },
        "use fp32",
    ),
    "optimizer": Refuse(
        "has no type and params", 'write "optimizer": {"type": "Adam", "params": {"lr": 0.0006}}', ()
    ),
    "optimizer.type": Together(neox_run.read_optimizer),
    "optimizer.params": Refuse("has no parameters", "set lr", ()),
    **{
        f"optimizer.params.{name}": Together(neox_run.read_parameter)
        for name in [
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "momentum",
            "freeze_step",
            "cuda_aware",
            "bias_correction",
            "adam_w_mode",
        ]
    },
    "use_bnb_optimizer": Refuse(
        "megalite has no 8-bit optimizer", "set it to false: AdamW has fp32 states here"
    ),
    "weight_decay": Take("optimizer.weight_decay", number, "norms and biases have none, as in GPT-NeoX"),
    "clip_grad": NoEffect("GPT-NeoX sets it to gradient_clipping of DeepSpeed, 1.0 where that is silent"),
    "lr_decay_style": Together(neox_run.read_decay),
    "min_lr": Together(neox_run.read_decay),
    "warmup": Together(neox_run.read_warmup),
    "lr_decay_iters": Together(neox_run.read_decay_length),
    "lr_decay_fraction": Together(neox_run.read_decay_length),
    "decay_lr_to": Refuse("GPT-NeoX no longer reads it", "set optimizer.minimum_ratio in run.toml", ()),
    "warmup_iters": Refuse("GPT-NeoX no longer reads it", "set optimizer.warmup_steps in run.toml", (0,)),
    "scheduler": Refuse("GPT-NeoX has its own schedule", "use lr_decay_style and warmup", ({},)),
    "seed": Take("run.seed", whole, "the draws are megalite's own"),
    "pipe_parallel_size": Take("parallel.pipeline", _stages),
    "model_parallel_size": Take("parallel.tensor", _stages),
    "sequence_parallel": Switch({"parallel.sequence": True}),
    "deepspeed": Refuse("GPT-NeoX runs under DeepSpeed alone", "leave it out", (True,)),
    "fp32_allreduce": NoEffect("gradients of bf16 and fp16 weights are summed in fp32"),
    "fp16.fp16": NoEffect("fp16.enabled decides"),
    **idle(
        "bf16 has no loss scale",
        "bf16.bf16 bf16.type bf16.loss_scale bf16.loss_scale_window bf16.initial_scale_power "
        "bf16.hysteresis bf16.min_loss_scale bf16.auto_cast",
    ),
    "fp16.type": NoEffect("fp16.enabled and precision decide; bfloat16 makes it bf16"),
    "train_impl": Together(_read_training_kind),
    "dpo_beta": Take("preference.beta", number),
    **refused("megalite's reference is the model before its tuning", "set it to false", "dpo_reference_free"),
    **idle("GPT-NeoX has it for reward models alone", "z_loss"),
    **idle("log-probabilities are computed in fp32", "dpo_fp32"),
    **idle(
        "it belongs to a training that is refused",
        "kto_fp32 kto_desirable_weight kto_undesirable_weight kto_beta fp32_reinforce kl_impl "
        "kl_div_beta reinforce_leave_one_out",
    ),
    **idle(
        "recomputing (training.recompute) keeps its inputs as megalite likes",
        "checkpoint_num_layers deepspeed_activation_checkpointing contiguous_checkpointing "
        "checkpoint_in_cpu synchronize_each_layer profile_backward partition_activations",
    ),
    **idle(
        "DeepSpeed's fp16 block has the loss scale",
        "hysteresis loss_scale loss_scale_window min_scale dynamic_loss_scale",
    ),
    **idle(
        _DERIVED,
        "world_size is_pipe_parallel optimizer_type zero_stage zero_reduce_scatter "
        "zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size lr batch_size "
        "local_rank rank iteration do_train do_valid do_test padded_vocab_size user_script "
        "curriculum_seqlen config_files params_dtype",
    ),
    **idle("a new run has a schedule of its own", "override_lr_scheduler use_checkpoint_lr_scheduler"),
    **idle(
        "stages have equal numbers of layers; set parallel.layers_per_stage for others",
        "pipe_partition_method",
    ),
}
_DATA_RULES: Mapping[str, KeyRule] = {
    "data_path": Take("data.source", text),
    "train_data_paths": Together(neox_run.read_paths),
    "train_data_weights": Together(neox_run.read_paths),
    "valid_data_paths": Together(neox_run.read_paths),
    "valid_data_weights": Together(neox_run.read_paths),
    "split": Together(neox_run.read_split),
    "tokenizer_type": Together(neox_run.read_tokenizer),
    "vocab_file": Together(neox_run.read_tokenizer),
    "merge_file": Together(neox_run.read_tokenizer),
    "eod_mask_loss": Refuse("the token after a document is part of the loss", "set it to false"),
    "data_impl": WordsOf({"mmap": {}, "infer": {}}, "megalite reads .bin and .idx files (mmap)"),
    "pack_impl": WordsOf({"packed": {}}, "megalite lays documents end to end (packed)"),
    "dataset_impl": Together(_read_training_kind),
    "weight_by_num_documents": Refuse(
        "megalite's blends have fixed weights", "write the weights in [[data.blend]]"
    ),
    **refused("GPT-NeoX's label files are not read", _DATA, "train_label_data_paths valid_label_data_paths"),
    **refused(
        "megalite does not train on rewards",
        "leave it out",
        "train_reward_data_paths valid_reward_data_paths",
    ),
    **refused(
        "GPT-NeoX's files of pairs are not read",
        _PAIRS,
        "pos_train_data_paths neg_train_data_paths pos_train_label_data_paths "
        "neg_train_label_data_paths pos_valid_data_paths neg_valid_data_paths "
        "pos_valid_label_data_paths neg_valid_label_data_paths",
    ),
    **idle(
        "megalite evaluate measures the loss of other text",
        "test_data_paths test_data_weights test_label_data_paths test_reward_data_paths "
        "pos_test_data_paths neg_test_data_paths pos_test_label_data_paths neg_test_label_data_paths",
    ),
    **idle("packed text is always cut", "allow_chopped short_seq_prob"),
    **idle("it belongs to weight_by_num_documents", "weighted_sampler_alpha"),
    **idle("megalite reads batches ahead (data.loader_workers)", "num_workers mmap_warmup use_shared_fs"),
    **refused("megalite reads files", "leave it out", "serve_model_weights"),
    **idle(
        "nothing is served while training", "weight_server_port online_dataserver_ips online_dataserver_ports"
    ),
}
_RUN: Mapping[str, KeyRule] = {
    "save": Together(answer_output),
    "global_num_gpus": Together(_read_ranks),
    "load": Together(neox_run.read_load),
    "finetune": Together(neox_run.read_load),
    **dict.fromkeys(("no_load_optim", "no_load_rng"), Together(neox_run.read_load)),
    "checkpoint_factor": Together(neox_run.read_saving),
    "checkpoint_scale": Together(neox_run.read_saving),
    "extra_save_iters": Refuse(
        "megalite saves at equal distances", "set checkpoint.every", ([],), numbers=False
    ),
    "keep_last_n_checkpoints": Take("checkpoint.keep_last", whole),
    "no_save_optim": Refuse("megalite's checkpoints are whole", "set it to false", numbers=False),
    "exit_interval": Refuse("a run ends after training.steps", "set training.stop_after", (), numbers=False),
    "eval_interval": Together(neox_run.read_evaluation),
    "eval_iters": Together(neox_run.read_evaluation),
    "log_interval": Take("monitor.every", whole),
    "tensorboard_dir": Change("monitor.tensorboard", lambda _: True, "written to run.folder/tensorboard"),
    "hostfile": Together(_read_hostfile),
    "include": Together(_read_hostfile),
    "exclude": Together(_read_hostfile),
    **idle(
        "GPT-NeoX's checkpoints only",
        "s3_path s3_chunk_size no_save_rng checkpoint_validation_with_forward_pass",
    ),
    **idle(
        _REPORTS,
        "use_wandb wandb_group wandb_run_name wandb_team wandb_project wandb_host "
        "wandb_init_all_ranks git_hash log_dir use_comet comet_workspace comet_project "
        "comet_experiment_name comet_tags comet_others comet_experiment peak_theoretical_tflops "
        "log_grad_pct_zeros log_param_norm log_grad_norm log_optimizer_states "
        "log_gradient_noise_scale gradient_noise_scale_n_batches gradient_noise_scale_cpu_offload "
        "memory_profiling memory_profiling_path profile profile_step_start profile_step_stop "
        "char_level_ppl",
    ),
    **idle(
        _LAUNCH,
        "num_nodes num_gpus master_port master_addr launcher force_multi autotuning_run no_ssh_check "
        "comment account distributed_backend deepspeed_mpi deepspeed_slurm deepscale deepscale_config "
        "adlr_autoresume adlr_autoresume_interval",
    ),
    **idle(
        "megalite generate writes text, megalite evaluate measures models",
        "text_gen_type precompute_model_name temperature top_p top_k return_logits maximum_tokens "
        "prompt_end sample_input_file sample_output_file num_samples recompute eval_results_prefix "
        "eval_tasks",
    ),
}
_DEEPSPEED = Together(_read_deepspeed)
RULES: Mapping[str, KeyRule] = {
    **dict.fromkeys(NAMES, _DEEPSPEED),
    **_MODEL,
    **_TRAINING,
    **_DATA_RULES,
    **_RUN,
}
"""Key of GPT-NeoX or DeepSpeed, tables with dots -> its rule."""


def read(sources: Sequence[Source]) -> Account:
    """Return the account of one or several GPT-NeoX files. Raises ConfigError for a file that cannot be read."""
    extra = {_EXTRA + block for block in BLOCKS}
    hostfiles = [source for source in sources if source.suffix not in MAPPINGS and is_hostfile(source)]
    own = [source for source in sources if source not in hostfiles]
    reading, unset = read_files(NAME, own, _BLOCKS | extra, hyphens=True)
    reading = _with_extra_arguments(reading)
    reading = answer_all(reading, unset, RULES, _STRUCTURES)
    complete(reading, neox_model.fill_model_defaults, neox_model.choose_family, neox_run.fill_run_defaults)
    neox_run.report_missing(reading)
    answer_launcher(reading.account, [], hostfiles)
    return reading.account


def _with_extra_arguments(reading: Reading) -> Reading:
    """Return the keys with those of deepspeed_extra_args among the others, as DeepSpeed gets them."""
    keys: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in reading.keys.items():
        inner = key.removeprefix(_EXTRA)
        name = key if inner in reading.keys else inner
        keys[name] = value
        names[name] = reading.names[key]
    return Reading(reading.account, keys, names)
