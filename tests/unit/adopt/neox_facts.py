"""GPT-NeoX configurations, from the facts of the public ones: sizes, rates and the lines in which they differ."""

from collections.abc import Mapping
from typing import Any

_BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 500000000,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500000000,
    "contiguous_gradients": True,
}
_FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
_COMMON: Mapping[str, Any] = {
    "pipe_parallel_size": 1,
    "model_parallel_size": 1,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "output_layer_parallelism": "column",
    "scaled_upper_triang_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "train_micro_batch_size_per_gpu": 4,
    "data_impl": "mmap",
    "checkpoint_activations": True,
    "checkpoint_num_layers": 1,
    "partition_activations": True,
    "synchronize_each_layer": True,
    "gradient_clipping": 1.0,
    "weight_decay": 0.1,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "fp16": _FP16,
    "train_iters": 320000,
    "lr_decay_iters": 320000,
    "distributed_backend": "nccl",
    "lr_decay_style": "cosine",
    "warmup": 0.01,
    "checkpoint_factor": 10000,
    "eval_interval": 1000,
    "eval_iters": 10,
    "log_interval": 100,
    "steps_per_print": 10,
    "keep_last_n_checkpoints": 4,
    "wall_clock_breakdown": True,
}
_PYTHIA: Mapping[str, Any] = {
    "rotary_pct": 0.25,
    "gpt_j_residual": True,
    "scaled_upper_triang_masked_softmax_fusion": True,
    "bias_gelu_fusion": True,
    "fp16": {**_FP16, "fp16": True, "initial_scale_power": 12},
    "train_iters": 143000,
    "lr_decay_iters": 143000,
    "checkpoint_factor": 1000,
    "extra-save-iters": [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
    "eval_interval": 143000,
    "num_workers": 1,
    "tokenizer_type": "HFTokenizer",
}
_LLAMA: Mapping[str, Any] = {
    "make_vocab_size_divisible_by": 1,
    "rotary_pct": 1,
    "gpt_j_residual": False,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1.0e-5,
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "activation": "swiglu",
    "mlp_multiple_of": 256,
}
# Their files have one rank a replica, which no machine holds.
_LONG: Mapping[str, Any] = {
    "num_kv_heads": 8,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "model_parallel_size": 8,
}
# name: layers, width, heads, peak learning rate, ZeRO stage, what else differs from the common lines.
_SIZES: Mapping[str, tuple[int, int, int, float, int, Mapping[str, Any]]] = {
    "19M": (
        6,
        512,
        8,
        0.001,
        1,
        {"deepspeed_extra_args": {"comms_logger": {"enabled": True, "verbose": True}}},
    ),
    "49M": (10, 640, 10, 0.0008, 1, {"rotary_pct": 0.25, "gpt_j_residual": True}),
    "125M": (12, 768, 12, 0.0006, 1, {"hostfile": "/mock_path"}),
    "350M": (24, 1024, 16, 0.0003, 1, {}),
    "760M": (24, 1536, 16, 0.00025, 1, {}),
    "800M": (16, 2048, 8, 0.00025, 1, {"train_micro_batch_size_per_gpu": 16}),
    "1-3B": (24, 2048, 16, 0.0002, 1, {}),
    "2-7B": (32, 2560, 32, 0.00016, 1, {}),
    "6-7B": (32, 4096, 32, 0.00012, 1, {}),
    "13B": (40, 5120, 40, 0.0001, 1, {}),
    # Theirs has one rank a replica, which no machine holds.
    "175B": (96, 12288, 96, 0.00006, 1, {"model-parallel-size": 8, "pipe-parallel-size": 12}),
    "zero-2": (24, 1024, 16, 0.0003, 2, {"pipe-parallel-size": 0}),
    "zero-3": (24, 1024, 16, 0.0003, 3, {"pipe-parallel-size": 0, "precision": "bfloat16", "fp16": None}),
    "zero-1-offload": (24, 1024, 16, 0.0003, 1, {}),
    "bf16_125M": (12, 768, 12, 0.0006, 0, {"precision": "bfloat16", "fp16": None, "fp32_allreduce": True}),
    "bnb_125M": (12, 768, 12, 0.0006, 0, {"use_bnb_optimizer": True, "weight_decay": 0.0}),
    "slurm_125M": (12, 768, 12, 0.0006, 0, {"launcher": "slurm", "deepspeed_slurm": True, "comment": "neox"}),
    "flash": (12, 768, 12, 0.0006, 1, {"attention_config": [[["flash"], 12]]}),
    "sparse": (
        *(12, 768, 12, 0.0006, 1),
        {"attention_config": [[["local", "global"], "all"]], "sparsity_config": {"block": 16}},
    ),
    "dmoe": (12, 768, 12, 0.0006, 1, {"moe_num_experts": 8, "precision": "bfloat16", "fp16": None}),
    "mamba-130M": (24, 768, 12, 0.0006, 1, {"attention_config": [[["mamba"], 24]], "activation": "silu"}),
    "rwkv-170M": (12, 768, 12, 0.0008, 1, {"attention_config": [[["rwkv"], 12]], "activation": "silu"}),
    "gmlp": (12, 768, 12, 0.0006, 1, {"attention_config": [[["gmlp"], "all"]], "pos_emb": "none"}),
    "transformer-engine": (24, 2048, 16, 0.0002, 1, {"te_layernorm_mlp": True, "te_mha": True}),
    "pythia-14M": (6, 128, 4, 0.001, 0, {**_PYTHIA, "attention_config": [[["flash"], 6]]}),
    "pythia-70M": (6, 512, 8, 0.001, 1, {**_PYTHIA, "train_micro_batch_size_per_gpu": 32}),
    "pythia-160M": (12, 768, 12, 0.0006, 1, _PYTHIA),
    "pythia-410M": (24, 1024, 16, 0.0003, 1, _PYTHIA),
    "pythia-1B": (
        *(16, 2048, 8, 0.00025, 0),
        {
            **_PYTHIA,
            "fp16": {**_FP16, "type": "bfloat16", "auto_cast": True},
            "gradient_accumulation_steps": 4,
        },
    ),
    "pythia-1-4B": (24, 2048, 16, 0.0002, 1, _PYTHIA),
    "pythia-2-8B": (32, 2560, 32, 0.00016, 1, _PYTHIA),
    "pythia-6-9B": (32, 4096, 32, 0.00012, 1, {**_PYTHIA, "model-parallel-size": 2}),
    "pythia-12B": (36, 5120, 40, 0.00012, 1, {**_PYTHIA, "model-parallel-size": 4}),
    "llama-7B": (32, 4096, 32, 0.0002, 1, {**_LLAMA, "intermediate_size": 32768, "rms_norm_epsilon": 1e-6}),
    "llama-13B": (40, 5120, 40, 0.0002, 1, {**_LLAMA, "intermediate_size": 40960, "model_parallel_size": 2}),
    "llama-65B": (80, 8192, 64, 0.0002, 1, {**_LLAMA, "intermediate_size": 65536, "model_parallel_size": 8}),
    "llama2-70B": (
        *(80, 8192, 64, 0.0002, 1),
        {**_LLAMA, **_LONG, "intermediate_size": 86016},
    ),
    "codellama-34B": (
        *(48, 8192, 64, 0.0002, 1),
        {**_LLAMA, **_LONG, "rotary_emb_base": 1000000},
    ),
    "mistral-7B": (
        *(32, 4096, 32, 0.0002, 1),
        {**_LLAMA, "intermediate_size": 43008, "num_kv_heads": 8, "sliding_window_width": 4096},
    ),
    "llemma-7B": (32, 4096, 32, 0.0001, 1, {**_LLAMA, "warmup_iters": 500, "decay_lr_to": 0.033}),
    "learned": (
        12,
        768,
        12,
        0.0006,
        1,
        {"pos_emb": "learned", "no_weight_tying": False, "init_method": "normal"},
    ),
}
REFUSED: Mapping[str, set[str]] = {
    "bnb_125M": {"use_bnb_optimizer"},
    "sparse": {"attention_config", "sparsity_config"},
    "dmoe": {"moe_num_experts"},
    "mamba-130M": {"attention_config"},
    "rwkv-170M": {"attention_config"},
    "gmlp": {"attention_config", "pos_emb"},
    "transformer-engine": {"te_layernorm_mlp", "te_mha"},
    "llemma-7B": {"warmup_iters", "decay_lr_to"},
}
"""The refused keys that change the numbers; the other configurations have none."""
NAMES = (*_SIZES, "20B")

LOCAL: Mapping[str, Any] = {
    "data_path": "data/enwik8/enwik8_text_document",
    "vocab_file": "data/gpt2-vocab.json",
    "merge_file": "data/gpt2-merges.txt",
    "save": "checkpoints",
    "load": "checkpoints",
    "checkpoint_validation_with_forward_pass": False,
    "tensorboard-dir": "tensorboard",
    "log_dir": "logs",
}
CLUSTER: Mapping[str, Any] = {
    "train-data-paths": ["data/enwik8/enwik8_text_document"],
    "valid-data-paths": ["data/enwik8/enwik8_val_text_document"],
    "test-data-paths": ["data/enwik8/enwik8_test_text_document"],
    "vocab-file": "data/gpt2-vocab.json",
    "merge-file": "data/gpt2-merges.txt",
    "save": "checkpoints",
    "load": "checkpoints",
    "tensorboard-dir": "tensorboard",
    "log-dir": "logs",
    "wandb_team": "eleutherai",
    "wandb_project": "neox",
}


def configuration(name: str) -> dict[str, Any]:
    """Return the keys of a public configuration."""
    if name == "20B":
        return _twenty_billion()
    layers, width, heads, rate, stage, others = _SIZES[name]
    zero: dict[str, Any] = {"stage": stage, **_BUCKETS}
    if name == "zero-1-offload":
        zero["cpu_offload"] = True
    table = {
        **_COMMON,
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "optimizer": {"type": "Adam", "params": {"lr": rate, "betas": [0.9, 0.95], "eps": 1e-8}},
        "min_lr": rate / 10,
        "zero_optimization": zero,
    }
    for key, value in others.items():
        table.pop(key.replace("-", "_"), None)
        table[key] = value
    return table


def _twenty_billion() -> dict[str, Any]:
    table = configuration("pythia-70M")
    table |= {"num_layers": 44, "hidden_size": 6144, "num_attention_heads": 64, "pipe_parallel_size": 4}
    table |= {
        "model_parallel_size": 2,
        "gradient_accumulation_steps": 32,
        "train_micro_batch_size_per_gpu": 4,
    }
    table |= {
        "train_iters": 150000,
        "lr_decay_iters": 150000,
        "weight_decay": 0.01,
        "split": "995,4,1",
        "log_interval": 2,
    }
    table["optimizer"] = {"type": "Adam", "params": {"lr": 0.97e-4, "betas": [0.9, 0.95], "eps": 1e-8}}
    table["min_lr"] = 0.97e-5
    return table
