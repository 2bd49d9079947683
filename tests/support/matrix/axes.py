"""The axes of the table: each value of an axis is a few lines of a run file.

A new value is a new line here, a new axis a new entry of AXES; `python -m tests.parity.run_matrix --write` then
regenerates the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""`section.key` -> value, as in a run file."""
Row = Mapping[str, str]
"""Axis -> the name of its value; a row of the table has all axes, a partial row some of them."""

# Settings of all rows. SGD, because Adam hides a wrong constant factor.
BASE: Settings = {
    "run.seed": 7,
    "model.hidden_size": 48,
    "model.intermediate_size": 76,
    "model.num_attention_heads": 8,
    "model.max_position_embeddings": 64,
    "training.steps": 2,
    "training.sequence_length": 12,
    "training.threads": 1,
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.1,
    "optimizer.schedule": "constant",
    "tokenizer.path": "unused",
    "data.source": "unused",
    "checkpoint.export": False,
}


@dataclass(frozen=True)
class Axis:
    """The values of an axis, the plain one first.

    changes_numbers: whether the value changes a run's numbers, so that the reference process must have the value too.
    """

    values: Mapping[str, Settings]
    changes_numbers: bool = False


def _each(key: str, *values: Any) -> dict[str, Settings]:
    return {str(value): {key: value} for value in values}


def _layouts() -> dict[str, Settings]:
    """Return all layouts of up to 8 ranks with powers of two, and a few others."""
    cubes = [(tp, pp, dp) for tp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2, 4, 8) if tp * pp * dp <= 8]
    odd = [(1, 3, 1), (2, 3, 1), (1, 1, 3), (1, 2, 3)]
    return {
        f"tp{tp}-pp{pp}-dp{dp}": {"parallel.tensor": tp, "parallel.pipeline": pp, "parallel.data": dp}
        for tp, pp, dp in sorted(cubes + odd, key=lambda sizes: (sizes[0] * sizes[1] * sizes[2], sizes))
    }


def _mixture(experts: int, chosen: int) -> Settings:
    return {
        "model.num_experts": experts,
        "model.num_experts_per_tok": chosen,
        "model.moe_intermediate_size": 22,
        "training.router_balance": 0.3,
    }


ZERO = "deepspeed.zero_optimization"

AXES: Mapping[str, Axis] = {
    "layout": Axis(_layouts()),
    "context": Axis(
        {
            "off": {"parallel.context": 1},
            **{
                method: {"parallel.context": 2, "parallel.context_method": method}
                for method in ("gather", "ring", "ulysses")
            },
        }
    ),
    "experts": Axis(
        {
            "none": {},
            # The ranks of tp share each expert; no number of ranks divides them.
            "softmax": {**_mixture(7, 2), "model.first_k_dense_replace": 1, "training.router_z": 0.05},
            "ep2": {**_mixture(8, 2), "model.decoder_sparse_step": 2, "parallel.expert": 2},
            "sigmoid ep2 whole": {
                **_mixture(9, 3),
                "model.router_scores": "sigmoid",
                "model.routed_scaling_factor": 2.5,
                "model.n_group": 3,
                "model.topk_group": 2,
                "model.router_correction_bias": True,
                "model.shared_intermediate_size": 20,
                "training.router_bias_rate": 0.1,
                "parallel.expert": 2,
                "parallel.expert_tensor": 1,
            },
        },
        changes_numbers=True,
    ),
    "schedule": Axis(
        _each(
            "parallel.schedule",
            "1f1b",
            "gpipe",
            "interleaved_1f1b",
            "looped_bfs",
            "interleaved_zero_bubble",
            "zbv",
            "dualpipev",
        )
    ),
    "chunks": Axis(_each("parallel.virtual_stages", 1, 2, 3)),
    "micro_batches": Axis(_each("training.micro_batches", 8, 4, 2, 1)),
    "zero": Axis(
        {
            "0": {},
            "1": {f"{ZERO}.stage": 1},
            "2": {f"{ZERO}.stage": 2},
            # By default ZeRO 3 would not partition such small weights; this threshold excludes only the norms.
            "3": {f"{ZERO}.stage": 3, f"{ZERO}.stage3_param_persistence_threshold": 100},
        },
    ),
    "offload": Axis(
        {
            "none": {},
            "optimizer": {f"{ZERO}.offload_optimizer.device": "cpu"},
            "parameters": {
                f"{ZERO}.offload_optimizer.device": "cpu",
                f"{ZERO}.offload_param.device": "cpu",
            },
        }
    ),
    "precision": Axis(
        {
            **_each("training.precision", "fp64", "fp32", "bf16"),
            # Low enough that no step is skipped; overflows have their own tests.
            "fp16": {"training.precision": "fp16", "training.initial_loss_scale_power": 8},
        },
        changes_numbers=True,
    ),
    "accumulation": Axis({"fp32": {}, "model": {"training.accumulation": "model"}}),
    "sequence": Axis({"off": {}, "on": {"parallel.sequence": True}}),
    "kv_heads": Axis(_each("model.num_key_value_heads", 4, 8, 2, 1), changes_numbers=True),
    "compile": Axis({"off": {}, "on": {"training.compile": True}}),
    "recompute": Axis(
        {
            "none": {},
            "selective": {"training.recompute": "selective"},
            "full": {"training.recompute": "full"},
            "first 1": {"training.recompute": "full", "training.recompute_layers": 1},
            "half": {"training.recompute": "full", "training.recompute_ratio": 0.5},
        }
    ),
    "dropout": Axis(
        {
            "off": {},
            "hidden": {
                "model.embedding_dropout": 0.1,
                "model.residual_dropout": 0.2,
                "model.mlp_dropout": 0.3,
            },
            "attention": {"model.attention_dropout": 0.2},
        },
        changes_numbers=True,
    ),
    "documents": Axis({"off": {}, "on": {"data.document_mask": True}}, changes_numbers=True),
    "loss": Axis(
        {
            "plain": {},
            "smoothed": {"training.label_smoothing": 0.1},
            "z-loss": {"training.z_loss": 0.01},
        },
        changes_numbers=True,
    ),
    "family": Axis(
        {
            **_each("model.family", "llama", "gpt2", "qwen3", "qwen2", "phi3", "gemma"),
            "mistral": {"model.family": "mistral", "model.sliding_window": 5},
        },
        changes_numbers=True,
    ),
    "adapter": Axis(
        {
            "none": {},
            "lora": {
                "adapter.kind": "lora",
                "adapter.rank": 3,
                "adapter.targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
                "adapter.dropout": 0.2,
            },
            "dora": {
                "adapter.kind": "lora",
                "adapter.rank": 2,
                "adapter.targets": ["k_proj", "o_proj", "up_proj"],
                "adapter.modules_to_save": ["model.norm"],
                "adapter.dora": True,
                "adapter.rslora": True,
            },
            "prefix": {"adapter.kind": "prefix", "adapter.tokens": 3},
            "projected prefix": {"adapter.kind": "prefix", "adapter.tokens": 2, "adapter.projection": 5},
        },
        changes_numbers=True,
    ),
    "objective": Axis(
        {
            "tokens": {},
            # Small enough that two steps do not multiply rounding: gradients are sums over answers.
            "preferences": {"data.kind": "preference", "preference.beta": 0.3},
        },
        changes_numbers=True,
    ),
    "clipping": Axis(
        {
            "norm": {"optimizer.gradient_clipping": 0.5},
            "value": {"optimizer.gradient_clipping": 0.0, "optimizer.clip_value": 0.002},
            "none": {"optimizer.gradient_clipping": 0.0},
        },
        changes_numbers=True,
    ),
    "layers": Axis({"balanced": {}, "uneven": {}}),
    "kernels": Axis(_each("model.kernels", "reference", "fused")),
    "micro_batch_size": Axis(_each("training.micro_batch_size", 1, 2)),
    "tied": Axis(
        {
            "yes": {"model.tie_word_embeddings": True},
            "no": {"model.tie_word_embeddings": False},
        },
        changes_numbers=True,
    ),
    "vocabulary": Axis(_each("model.vocab_size", 101, 96), changes_numbers=True),
}
MIXTURES = tuple(AXES["experts"].values)[1:]
# Axes that joined when the rows over the others had run: those rows stay, each with a value of these.
LATER = ("context", "experts")

# torch.compile takes many times longer than the rest of a row: only a few layouts test it.
COMPILED_LAYOUTS = ("tp1-pp1-dp1", "tp1-pp2-dp1", "tp1-pp1-dp2")

# Combinations that run, but not in this table: on a CPU DeepSpeed refuses fp16 under ZeRO unless overridden
# (tests/distributed/test_zero_precision.py), and it sums bf16 and fp16 gradients in another order.
ELSEWHERE: tuple[Row, ...] = (
    *({"zero": stage, "precision": "fp16"} for stage in "123"),
    *({"zero": stage, "accumulation": "model"} for stage in "123"),
    # tests/parity/test_experts.py, and in 16 bits test_experts_zero.py: there a layout's rounding moves a token from
    # one expert to another, which changes that expert's gradient by more than any bound of rounding.
    *({"experts": form, "adapter": adapter} for form in MIXTURES for adapter in ("lora", "dora")),
    *({"experts": form, "precision": precision} for form in MIXTURES for precision in ("bf16", "fp16")),
)
