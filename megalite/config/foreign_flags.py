"""Flags of DeepSpeed's and Megatron-LM's launch convention: the first are taken, the second are answered with ours."""

from collections.abc import Iterator, Sequence

from megalite.errors import Problem

DEEPSPEED = "--deepspeed"
"""The switch that asks for DeepSpeed. Its file is named by --deepspeed_config, or by the word behind the switch."""
_CONFIG = ("--deepspeed_config", "--deepspeed-config")

# Megatron-LM's flag -> ours; {} stands for the value behind the flag.
MEGATRON = {
    "tensor-model-parallel-size": "--parallel.tensor {}",
    "pipeline-model-parallel-size": "--parallel.pipeline {}",
    "sequence-parallel": "--parallel.sequence true",
    "num-layers-per-virtual-pipeline-stage": "--parallel.schedule interleaved_1f1b and --parallel.virtual_stages {}",
    "num-virtual-stages-per-pipeline-rank": "--parallel.schedule interleaved_1f1b and --parallel.virtual_stages {}",
    "use-distributed-optimizer": "--deepspeed.zero_optimization.stage 1",
    "num-layers": "--model.num_hidden_layers {}",
    "hidden-size": "--model.hidden_size {}",
    "ffn-hidden-size": "--model.intermediate_size {}",
    "num-attention-heads": "--model.num_attention_heads {}",
    "num-query-groups": "--model.num_key_value_heads {}",
    "group-query-attention": "--model.num_key_value_heads N",
    "kv-channels": "--model.head_dim {}",
    "max-position-embeddings": "--model.max_position_embeddings {}",
    "position-embedding-type": "--model.position_embedding {}",
    "rotary-base": "--model.rope_theta {}",
    "rotary-percent": "--model.partial_rotary_factor {}",
    "normalization": "--model.norm rms_norm or layer_norm",
    "norm-epsilon": "--model.rms_norm_eps {}",
    "swiglu": "--model.gated_mlp true and --model.hidden_act silu",
    "qk-layernorm": "--model.qk_norm head",
    "add-qkv-bias": "--model.attention_bias true",
    "disable-bias-linear": "--model.mlp_bias false and --model.attention_output_bias false",
    "untie-embeddings-and-output-weights": "--model.tie_word_embeddings false",
    "init-method-std": "--model.initializer_range {}",
    "attention-dropout": "--model.attention_dropout {}",
    "hidden-dropout": "--model.residual_dropout {}",
    "seq-length": "--training.sequence_length {}",
    "micro-batch-size": "--training.micro_batch_size {}",
    "global-batch-size": "--training.global_batch_size {}",
    "train-iters": "--training.steps {}",
    "train-samples": "--training.steps {} / training.global_batch_size",
    "bf16": "--training.precision bf16",
    "fp16": "--training.precision fp16",
    "loss-scale": "--training.loss_scale {}",
    "recompute-activations": "--training.recompute selective",
    "recompute-granularity": "--training.recompute {}",
    "recompute-num-layers": "--training.recompute_layers {}",
    "optimizer": "--optimizer.name {}",
    "lr": "--optimizer.learning_rate {}",
    "min-lr": "--optimizer.minimum_ratio {} / optimizer.learning_rate",
    "lr-decay-style": "--optimizer.schedule {}",
    "lr-decay-iters": "--optimizer.decay_steps {}",
    "lr-warmup-iters": "--optimizer.warmup_steps {}",
    "lr-warmup-fraction": "--optimizer.warmup_ratio {}",
    "weight-decay": "--optimizer.weight_decay {}",
    "clip-grad": "--optimizer.gradient_clipping {}",
    "adam-beta1": "--optimizer.betas '[{}, 0.95]'",
    "adam-beta2": "--optimizer.betas '[0.9, {}]'",
    "adam-eps": "--optimizer.eps {}",
    "data-path": "--data.source {}, or [[data.blend]] with weights",
    "train-data-path": "--data.source {}",
    "valid-data-path": "--data.validation {}",
    "split": "--data.split, as in '[0.98, 0.02]'",
    "reset-attention-mask": "--data.document_mask true",
    "reset-position-ids": "--data.document_mask true",
    "tokenizer-model": "--tokenizer.path {}",
    "vocab-file": "--tokenizer.path with the folder of {}",
    "merge-file": "--tokenizer.path with the folder of {}",
    "save": "--run.folder {}",
    "load": "--checkpoint.resume {} (megalite convert import reads Megatron-LM's checkpoints)",
    "save-interval": "--checkpoint.every {}",
    "eval-interval": "--validation.every {}",
    "eval-iters": "--validation.samples {} * training.global_batch_size",
    "log-interval": "--monitor.every {}",
    "tensorboard-dir": "--monitor.tensorboard true",
    "exit-duration-in-mins": "--training.stop_after {}m",
    "seed": "--run.seed {}",
}
_SEVERAL_VALUES = ("data-path", "train-data-path", "valid-data-path")


def with_deepspeeds_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --deepspeed_config FILE as --deepspeed.config=FILE.

    A file behind the switch --deepspeed counts alike; without one the switch stays for `apply_overrides`.
    """
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        takes_next = not equals and bool(rest) and not rest[0].startswith("--")
        if name in _CONFIG:
            value = rest.pop(0) if takes_next else value
            kept.append(f"--deepspeed.config={value}" if value else "--deepspeed.config")
        elif name == DEEPSPEED and (equals or (takes_next and rest[0].endswith(".json"))):
            kept.append(f"--deepspeed.config={value if equals else rest.pop(0)}")
        else:
            kept.append(name + equals + value)
    return kept


def megatron_problems(arguments: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem with our flag for each flag of Megatron-LM."""
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        ours = MEGATRON.get(name.removeprefix("--")) if name.startswith("--") else None
        if ours is None:
            continue
        values = [value] if equals else []
        several = name.removeprefix("--") in _SEVERAL_VALUES
        while (
            not equals and rest and not rest[0].startswith("--") and "{}" in ours and (several or not values)
        ):
            values.append(rest.pop(0))
        shown = values[0] if len(values) == 1 else "VALUE"
        yield Problem(name, "is a flag of Megatron-LM", f"write {ours.format(shown)}")
