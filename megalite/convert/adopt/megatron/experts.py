"""Megatron-LM's arguments of experts: the mixture that they describe, and what becomes of each."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from megalite.convert.adopt.rules import KeyRule, NoEffect, Reading, Refuse, Take, computed, number, whole
from megalite.topology.experts import ExpertShape

_LONGEST = 10_000
_OF_DEEPSPEED = (
    *("deepspeed", "moe-expert-parallel-size", "moe-train-capacity-factor", "moe-eval-capacity-factor"),
    *("moe-loss-coeff", "moe-min-capacity", "expert-interval", "mlp-type", "topk", "use-tutel"),
)
_WITHOUT_EXPERTS = "it belongs to --num-experts"
_BALANCES = {
    "seq_aux_loss": "",
    "aux_loss": "the balance of each sequence alone here, of a micro batch there",
    "global_aux_loss": "the balance of each sequence alone here, of the global batch there",
}


def has_experts(reading: Reading) -> bool:
    """Return whether the arguments give a layer more than one expert; Megatron-DeepSpeed's default is one."""
    return str(reading.get("num-experts") or 0) not in ("0", "1")


def layer_pattern(value: Any) -> int | list[int]:
    """Read --moe-layer-freq: a number, or 0 (dense) or 1 of each layer, as in ([0]*1+[1]*23). Raises ValueError."""
    words = value if isinstance(value, list) else [str(value).strip("'\" ")]
    try:
        read = _evaluated(ast.parse(",".join(map(str, words)), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        read = 0
    if not read or (isinstance(read, list) and not set(read) <= {0, 1}):
        raise ValueError(f"{value!r} is neither a number nor a list of 0 and 1 for each layer")
    return read


def _evaluated(node: ast.expr) -> int | list[int]:
    """Return the number, or the list of sums and repetitions, of an expression. Raises ValueError for another."""
    match node:
        case ast.Constant(value=int() as figure) if not isinstance(figure, bool):
            return figure
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [figure for figure in map(_evaluated, elements) if isinstance(figure, int)]
        case ast.BinOp(left=first, op=ast.Add(), right=second):
            left, right = _evaluated(first), _evaluated(second)
            if isinstance(left, list) and isinstance(right, list):
                return left + right
        case ast.BinOp(left=first, op=ast.Mult(), right=second):
            left, right = _evaluated(first), _evaluated(second)
            if isinstance(left, list) and isinstance(right, int) and len(left) * right <= _LONGEST:
                return left * right
    raise ValueError


def expert_problems(reading: Reading, table: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, reason, remedy) of the arguments of a mixture that is not built. table: name -> parsed value."""
    if any(reading.has(key) for key in _OF_DEEPSPEED):
        reason = "DeepSpeed's experts drop the tokens beyond their capacity; megalite drops none"
        yield "num_experts", reason, "set model.num_experts and the settings beside it in run.toml"
    elif "swiglu" not in table or "disable_bias_linear" not in table:
        remedy = "add --swiglu and --disable-bias-linear"
        yield "num_experts", "an expert is down(silu(gate(x)) * up(x)), without biases", remedy
    scores = table.get("moe_router_score_function", "softmax")
    if scores not in ("softmax", "sigmoid"):
        yield "moe_router_score_function", "megalite has no such choice", "use softmax or sigmoid"
    pattern, layers = table.get("moe_layer_freq", 1), table.get("num_layers", 0)
    if isinstance(pattern, list) and len(pattern) != layers:
        yield "moe_layer_freq", f"names {len(pattern)} layers, but there are {layers}", "correct it"
    elif isinstance(pattern, list) and not any(pattern):
        yield "moe_layer_freq", "leaves no layer with experts", "leave out --num-experts"
    groups, chosen = table.get("moe_router_num_groups", 1), table.get("moe_router_group_topk", 1)
    summed, built = table.get("moe_router_topk", 2) // max(1, chosen), 2 if scores == "sigmoid" else 1
    if chosen < groups and summed != built:
        reason = f"ranks groups by the sum of their {summed} best scores, megalite with {scores} of {built}"
        yield "moe_router_num_groups", reason, "set model.n_group in run.toml if that is meant"


def experts_of(table: Mapping[str, Any]) -> ExpertShape:
    """Return the experts that the arguments describe. table: name -> parsed value, with num_layers."""
    chosen, layers = table.get("moe_router_topk", 2), range(table["num_layers"])
    pattern = table.get("moe_layer_freq", 1)
    has = pattern if isinstance(pattern, list) else [int(layer % pattern == 0) for layer in layers]
    sigmoid = table.get("moe_router_score_function") == "sigmoid"
    return ExpertShape(
        table["num_experts"],
        chosen,
        table.get("moe_ffn_hidden_size", table["ffn_hidden_size"]),
        shared_intermediate_size=table.get("moe_shared_expert_intermediate_size", 0),
        router_scores="sigmoid" if sigmoid else "softmax",
        # Softmax of the chosen logits alone is softmax of all, divided by the sum of the chosen.
        norm_topk_prob=chosen > 1 if sigmoid else "moe_router_pre_softmax" not in table,
        routed_scaling_factor=table.get("moe_router_topk_scaling_factor", 1.0),
        n_group=table.get("moe_router_num_groups", 1),
        topk_group=table.get("moe_router_group_topk", 1),
        correction_bias="moe_router_enable_expert_bias" in table,
        mlp_only_layers=tuple(layer for layer in layers if not has[layer]),
    )


def read_expert_argument(reading: Reading, key: str, value: Any) -> None:
    """Answer an argument of experts that is none of the model's, once the model is answered."""
    if not _is_mixture(reading):
        reading.no_effect(key, _WITHOUT_EXPERTS)
    elif (rule := _RULES.get(key)) is not None:
        rule.answer(reading, key, value)
    else:
        reading.refuse(
            key, "is no argument of experts that megalite knows", "find its meaning, or leave it out"
        )


def _is_mixture(reading: Reading) -> bool:
    """Return whether the model, which is answered first, has experts and they were taken."""
    return bool(reading.account.settings.get("model.num_experts"))


def _balance(reading: Reading, key: str, value: Any) -> None:
    """Answer --moe-router-load-balancing-type and --moe-aux-loss-coeff together."""
    kind, weight = "moe-router-load-balancing-type", "moe-aux-loss-coeff"
    name = reading.get(kind, "aux_loss")
    if isinstance(name, list):
        for each in (kind, weight):
            reading.refuse(each, "megalite has one loss of balance", "set training.router_balance")
    elif name == "sinkhorn":
        reading.refuse(kind, "megalite's routers choose the best scores alone", "use aux_loss or none")
        reading.no_effect(weight, "sinkhorn has no loss")
    elif name == "none" or not number(reading.get(weight, 0)):
        reading.no_effect(kind, "the loss has no weight")
        reading.no_effect(weight, "there is no such loss")
    elif name in _BALANCES:
        settings, difference = {"training.router_balance": number(reading.get(weight))}, _BALANCES[name]
        report = reading.change if difference else reading.take
        report(weight, settings, difference)
        report(kind, settings, difference)
    else:
        reading.refuse(kind, "megalite has no such loss", "set training.router_balance")


def _bias_rate(reading: Reading, key: str, value: Any) -> None:
    if reading.is_on("moe-router-enable-expert-bias"):
        reading.take(key, {"training.router_bias_rate": number(value)})
    else:
        reading.no_effect(key, "--moe-router-enable-expert-bias is off")


def _expert_tensor(reading: Reading, key: str, value: Any) -> None:
    ranks, tensor = whole(value), whole(reading.get("tensor-model-parallel-size", 1))
    if ranks not in (1, tensor):
        raise ValueError(f"megalite cuts an expert over 1 rank or over all {tensor} tensor-parallel ranks")
    reading.take(key, {"parallel.expert_tensor": ranks})


def _capacity(reading: Reading, key: str, value: Any) -> None:
    if number(value) < 0:
        reading.no_effect(key, "no token is dropped, as here")
    else:
        remedy = "leave it out: the tokens beyond the capacity are computed too"
        reading.refuse(key, "megalite drops no token", remedy)


def _router_type(reading: Reading, key: str, value: Any) -> None:
    if value == "fp32":
        reading.no_effect(key, "routers compute in fp32 here")
    else:
        reading.change(key, {}, "routers compute in fp32 here")


def expert_defaults(reading: Reading) -> None:
    """Write out Megatron-LM's defaults of experts, and name what no setting removes."""
    account = reading.account
    if not _is_mixture(reading):
        return
    if reading.is_on("moe-router-enable-expert-bias"):
        reason = "Megatron-LM's default of --moe-router-bias-update-rate; 0 here"
        account.default("training.router_bias_rate", 1e-3, reason)
    if not reading.has("moe-router-dtype") and (reading.is_on("bf16") or reading.is_on("fp16")):
        account.note("routers compute in the precision of the weights there, in fp32 here")
    account.note(
        "checkpoints of mixtures are not read: begin anew, or name a folder of Hugging Face files in model.weights"
    )


_ZERO = (False, "false", "0", "0.0", 0)
_RULES: Mapping[str, KeyRule] = {
    "expert-model-parallel-size": Take("parallel.expert", whole),
    "moe-z-loss-coeff": Take("training.router_z", number),
    "moe-input-jitter-eps": Refuse("megalite's routers have no noise", "leave it out", _ZERO),
    "moe-apply-probs-on-input": Refuse("weights multiply the outputs of experts here", "leave it out"),
    "moe-latent-size": Refuse("experts have the width of the residual stream here", "leave it out", _ZERO),
    "moe-router-force-load-balancing": Refuse("it sends tokens at random, to measure speed", "leave it out"),
    "moe-router-topk-limited-devices": Refuse(
        "megalite limits the groups of a token",
        "use --moe-router-num-groups and --moe-router-group-topk",
        _ZERO,
    ),
    "moe-shared-expert-gate": Refuse("megalite's shared experts have no gate", "leave it out"),
    "moe-use-upcycling": Refuse("experts begin from a dense model's weights", "leave it out, to begin anew"),
    **computed(
        {
            _balance: "moe-router-load-balancing-type moe-aux-loss-coeff",
            _bias_rate: "moe-router-bias-update-rate",
            _expert_tensor: "expert-tensor-parallel-size",
            _capacity: "moe-expert-capacity-factor",
            _router_type: "moe-router-dtype",
        }
    ),
    **{
        key: NoEffect(reason)
        for reason, keys in {
            "megalite has its own operators and exchange of experts; the numbers stay the same": """
                moe-deepep-num-sms moe-enable-deepep moe-extended-tp moe-flex-dispatcher-backend moe-grouped-gemm
                moe-hybridep-num-sms moe-pad-experts-for-cuda-graph-inference moe-permute-fusion moe-router-fusion
                moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-shared-expert-overlap
                moe-token-dispatcher-type moe-use-legacy-grouped-gemm""",
            "it belongs to --moe-expert-capacity-factor; megalite drops no token": """
                moe-pad-expert-input-to-capacity moe-token-drop-policy moe-token-dropping""",
            "it belongs to --moe-use-upcycling": "moe-upcycling-granularity",
            "megalite records the load of the experts at every step": "moe-per-layer-logging",
            "it saves memory alone; here training.recompute does": "moe-layer-recompute",
            "it repeats the choices of another program": "moe-enable-routing-replay",
        }.items()
        for key in keys.split()
    },
}
