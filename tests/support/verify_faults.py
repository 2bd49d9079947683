"""Faults that `megalite verify` has to find: each with settings of a run file that show it, and whom it must name.

They are planted in the parallel ranks alone. Most are those of the parity tests (tests/support/mutations.py and
beside it), here with a run file in place of a job.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import getattr_static
from itertools import count
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megalite.model import dropout, head
from megalite.parallel import context_attention, pipeline, schedule
from megalite.topology.place import RankPlace
from megalite.topology.schedules import WEIGHT, Action
from megalite.train import loaders
from megalite.train.optimizer import settings as optimizer_settings
from megalite.train.optimizer import update
from tests.support.context_faults import CONTEXT_FAULTS, ContextFault
from tests.support.expert_faults import EXPERT_FAULTS
from tests.support.gpt_oss_faults import GPT_OSS_FAULTS
from tests.support.latent_faults import LATENT_FAULTS
from tests.support.matrix.axes import AXES
from tests.support.mutations import FAULTS, OPTIMIZER_FAULTS, PREFERENCE_FAULTS, PREFIX_FAULTS, Fault

Settings = Mapping[str, Any]
ZERO = "deepspeed.zero_optimization"


@dataclass(frozen=True)
class RunFault:
    """`target.attribute` is replaced by `replace(original)` in the ranks of a layout.

    settings: of the run file that shows it.
    """

    target: Any
    attribute: str
    replace: Callable[[Any], Any]
    settings: Settings


def _of(fault: Fault | ContextFault, **settings: Any) -> RunFault:
    """Return a fault of the parity tests; of a row of the matrix the settings that show it come with it."""
    shown = dict[str, Any]()
    for axis, value in fault.shown_by.items() if isinstance(fault, Fault) else ():
        if axis == "optimizer":
            shown["optimizer.name"] = value
        elif axis in AXES:
            shown |= AXES[axis].values[value]
    return RunFault(fault.target, fault.attribute, fault.replace, shown | settings)


# ------------------------------------------------------------------------------------------------------- new mistakes


def _off_by_the_log_of_ranks(cross_entropy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def losses(logits: Tensor, labels: Tensor, mask: Tensor, shard: Any, terms: Any) -> Tensor:
        counted = mask * (labels >= 0)
        return cross_entropy(logits, labels, mask, shard, terms) + math.log(shard.tp.size) * counted

    return losses


def _uncounted(word: str) -> Callable[[Any], Any]:
    return lambda is_counted: (
        lambda place, parameter: word not in parameter.name and is_counted(place, parameter)
    )


def _first_weight_gradient_dropped(compute: Any) -> Any:
    def step(self: Any, action: Action, needed: Any) -> Any:
        if action.kind == WEIGHT and action.micro_batch == 0:
            self._weight_gradients.pop((action.chunk, action.micro_batch))
            return None
        return compute(self, action, needed)

    return step


def _same_rows_on_every_rank(share: Any) -> Any:
    return lambda length, size, micro_batches, rank, ranks: share(length, size, micro_batches, 0, ranks)


def _rows_of_the_rank_before(share: Any) -> Any:
    return lambda length, size, count, rank, ranks: share(length, size, count, (rank + 1) % ranks, ranks)


def _without_groups(group_of: Any) -> Any:
    return lambda parameter, groups: None


def _average_left_alone(average: Any) -> Any:
    """Move the average of the first step alone."""
    steps = count()

    def averaged(optimizer: Any) -> None:
        if next(steps) == 0:
            average(optimizer)

    return averaged


def _of_the_ranks_own_stream(normal: Any) -> Any:
    """Key every mask by the rank too, as a generator that each rank has seeded for itself."""

    def keep_mask(seed: int, *others: Any, **rest: Any) -> Any:
        return normal(seed + dist.get_rank(), *others, **rest)

    return keep_mask


def _mean_of_means(micro_batches: Any) -> Any:
    """Weight every micro batch alike, whatever its tokens."""

    def alike(self: Any, number: int) -> Any:
        pieces = micro_batches(self, number)
        sums = [piece.loss_mask.sum() for piece in pieces]
        mean = sum(sums) / len(sums)
        return [
            replace(piece, loss_mask=piece.loss_mask * (mean / own))
            for piece, own in zip(pieces, sums, strict=True)
        ]

    return alike


def _no_documents(_: Any) -> Any:
    return lambda *block, **first: None


AXIS = {name: axis.values for name, axis in AXES.items()}
TP, PP, DP, CP = ({f"parallel.{axis}": 2} for axis in ("tensor", "pipeline", "data", "context"))
SEQUENCE = {**TP, "parallel.sequence": True}
DROPOUT = {**AXIS["dropout"]["hidden"], "model.attention_dropout": 0.2}
DOCUMENTS = {"data.document_mask": True}
PLAIN_KERNELS = {"model.kernels": "reference"}
ULYSSES, RING = ({**CP, "parallel.context_method": method} for method in ("ulysses", "ring"))
EXPERTS = AXIS["experts"]["softmax"]
EXPERT_RANKS = {**EXPERTS, **DP, "parallel.expert": 2}
WHOLE_EXPERTS = {**EXPERTS, **SEQUENCE, "parallel.expert": 2, "parallel.expert_tensor": 1}
SHARED = {"model.shared_intermediate_size": 20, "model.family": "deepseek_v2"}
COPIES = {**EXPERTS, "parallel.data": 4, "parallel.expert": 2}
LORA = {**AXIS["adapter"]["lora"], "model.weights": None}
LATENT = {
    **{"model.kv_lora_rank": 14, "model.q_lora_rank": 18, "model.v_head_dim": 5},
    **{"model.qk_nope_head_dim": 6, "model.qk_rope_head_dim": 4, "model.num_key_value_heads": 8},
}
GPT_OSS = {
    **{"model.family": "gpt_oss", "model.num_experts": 5, "model.num_experts_per_tok": 2},
    **{"model.intermediate_size": 20, "model.moe_intermediate_size": 20, "model.swiglu_limit": 0.7},
    **{"model.sliding_window": 5, "model.full_attention_every": 2, "training.router_balance": 0.3},
}
TIED = {"model.tie_word_embeddings": True}
OFFLOAD = {f"{ZERO}.offload_optimizer.device": "cpu"}
PREFIX = {**AXIS["adapter"]["projected prefix"], "model.weights": None}
PREFERENCES = {"data.kind": "preference", "preference.beta": 0.3}

# The ten of "what users suffer from", as far as they are faults; a few stand for several reports.
PAINS: dict[str, RunFault] = {
    "label smoothing over the shard's vocabulary": _of(FAULTS["label smoothing over the shard's vocabulary"]),
    "loss off by the logarithm of the tensor ranks": RunFault(
        head, "vocab_parallel_cross_entropy", _off_by_the_log_of_ranks, TP
    ),
    "norm without the sinks of attention": RunFault(
        RankPlace, "is_counted", _uncounted("sinks"), {**GPT_OSS, **TP}
    ),
    "norm without the norms' weights": RunFault(RankPlace, "is_counted", _uncounted("norm"), TP),
    "norm without the experts of other ranks": _of(
        EXPERT_FAULTS["norm without the experts of other ranks"], **EXPERT_RANKS
    ),
    "tied head counted twice in the norm": _of(FAULTS["tied head counted twice in the norm"], **TIED),
    "replicated norms counted once a tensor rank": _of(FAULTS["replicated norms counted once a tensor rank"]),
    "DeepSpeed's norm counts replicas": _of(FAULTS["DeepSpeed's norm counts replicas"]),
    "ZeRO 1 drops micro steps": _of(FAULTS["a ZeRO stage that drops micro steps"]),
    "ZeRO 1 with offload drops micro steps": _of(FAULTS["a ZeRO stage that drops micro steps"], **OFFLOAD),
    "ZeRO 2 drops micro steps that it has reduced": _of(
        FAULTS["a ZeRO stage that drops micro steps it has reduced"]
    ),
    "tied copies that drift": _of(FAULTS["tied copies that drift"], **TIED),
    "tied copies that drift under ZeRO": _of(FAULTS["tied copies that drift under ZeRO"], **TIED),
    "accumulation as a mean of means": RunFault(
        pipeline.StepBatch, "micro_batches", _mean_of_means, {**DP, "data.kind": "instruct"}
    ),
    "loss normalised by the rank's own tokens": _of(
        FAULTS["loss normalised by the rank's own tokens"], **{"data.kind": "instruct"}
    ),
    "a pipeline keeps the last micro batch": _of(FAULTS["only the last micro batch kept"], **PP),
    "30 layers on 4 stages train 28": _of(
        FAULTS["a dropped layer"], **{"parallel.pipeline": 4, "model.num_hidden_layers": 30}
    ),
    "fresh dropout in recompute": _of(FAULTS["fresh dropout in recompute"], **TP),
    "dropout of another rank's stream": RunFault(
        dropout, "keep_mask", _of_the_ranks_own_stream, {**DP, **DROPOUT}
    ),
    "context gradients summed over data ranks only": _of(
        CONTEXT_FAULTS["gradients summed over dp only"], **CP
    ),
    "loss of every context rank": _of(CONTEXT_FAULTS["tokens counted by every context rank"], **CP),
    "packed documents seen over context ranks": RunFault(
        context_attention, "documents_of_block", _no_documents, {**CP, **DOCUMENTS}
    ),
}

_CONTEXT: dict[str, Settings] = {
    "positions begin anew on each rank": CP,
    "labels are the next local tokens": CP,
    "loss mask of the first share": {**CP, "data.kind": "instruct"},
    "keys in the order of ranks": CP,
    "documents shifted by a token": {**CP, **DOCUMENTS, **DROPOUT, **PLAIN_KERNELS},
    "attention dropout by local positions": {**CP, **DROPOUT, **PLAIN_KERNELS},
    "residual dropout by local positions": {**CP, **DROPOUT},
    "masks of the first heads": {**ULYSSES, **DROPOUT},
    "tokens back as contiguous shares": ULYSSES,
}
_EXPERT: dict[str, Settings] = {
    "mean over the copies of experts": COPIES,
    "experts not summed over their copies": COPIES,
    "norm of every copy of experts": COPIES,
    "balance of a rank's own positions": {**EXPERTS, **CP, "parallel.expert": 2},
    "router losses of each data rank": EXPERT_RANKS,
    "router losses not attached": EXPERT_RANKS,
    "rows not sorted after the exchange": COPIES,
    "gradients of rows in the order of the forward": COPIES,
    "weights of another choice": EXPERT_RANKS,
    "experts drawn by their place on the rank": EXPERT_RANKS,
    "router's gradient of a rank's own positions": WHOLE_EXPERTS,
    "shared experts of each tensor rank": {**EXPERTS, **TP, **SHARED},
}
_PLAIN_ROWS = (
    "missing all-reduce of column-parallel input gradients",
    "missing all-reduce of row-parallel outputs",
    "norm of one stage",
    "loss reported once a tensor rank",
    "z-loss of the shard's vocabulary",
    "a dropped chunk",
    "two chunks swapped",
    "weights initialised alike on two shards",
    "documents of the first micro batch for all",
    "missing sum over data-parallel ranks",
    "gradients summed over data-parallel ranks in the first backward",
    "gradients summed over data-parallel ranks a layer too early",
    "tied weight of a V summed as if it were two",
    "norm weights' gradients of own positions only",
    "head norms' gradients of own heads only",
    "shared key-value heads' gradients of own queries only",
    "norm weights' gradients of own positions reduced by ZeRO",
    "sequence gather whose backward only splits",
    "dropout keyed by the rank's own samples",
    "dropout keyed by the rank's own positions",
    "dropout keyed by the rank's own features",
    "attention dropout keyed by the rank's own heads",
    "fused attention dropout without the head in its key",
    "LoRA scaled by the rank over tp",
    "LoRA whose A has the gradient of one rank's rows",
    "DoRA with the row norms of a rank's own columns",
    "adapter dropout keyed by the rank's own features",
)
MORE: dict[str, RunFault] = {
    **{name: _of(FAULTS[name]) for name in _PLAIN_ROWS},
    "a weight gradient of a split backward lost": RunFault(
        schedule._Step, "_compute", _first_weight_gradient_dropped, {**PP, "parallel.schedule": "zbv"}
    ),
    "every data rank reads the same rows": RunFault(loaders, "BatchShare", _same_rows_on_every_rank, DP),
    "groups of parameters forgotten": RunFault(
        optimizer_settings,
        "group_of",
        _without_groups,
        {**DP, "optimizer.groups": [{"pattern": "*.mlp.*", "learning_rate_ratio": 0.25}]},
    ),
    "moving average of the first step": RunFault(
        update, "_average_weights", _average_left_alone, {**DP, "optimizer.ema_decay": 0.9}
    ),
    **{name: _of(fault) for name, fault in OPTIMIZER_FAULTS.items()},
    **{name: _of(CONTEXT_FAULTS[name], **settings) for name, settings in _CONTEXT.items()},
    **{name: _of(EXPERT_FAULTS[name], **settings) for name, settings in _EXPERT.items()},
    "rotated key of each tensor rank": _of(LATENT_FAULTS["rotated key of each tensor rank"], **LATENT, **TP),
    "latent norm of a rank's own positions": _of(
        LATENT_FAULTS["latent norm of a rank's own positions"], **LATENT, **SEQUENCE
    ),
    "sink of every context rank": _of(GPT_OSS_FAULTS["sink of every context rank"], **GPT_OSS, **RING),
    "down bias of every tensor rank": _of(GPT_OSS_FAULTS["down bias of every tensor rank"], **GPT_OSS, **TP),
    "biases of another expert": _of(GPT_OSS_FAULTS["biases of another expert"], **GPT_OSS, **DP),
    "prefix positions forgotten": _of(PREFIX_FAULTS["prefix positions forgotten"], **PREFIX, **TP),
    "prefix trunk's gradients of own heads only": _of(
        PREFIX_FAULTS["prefix trunk's gradients of own heads only"], **PREFIX, **TP
    ),
    "prefix trunk's gradients of the own stage only": _of(
        PREFIX_FAULTS["prefix trunk's gradients of the own stage only"], **PREFIX, **PP
    ),
    "preferences of a part of each row": _of(
        CONTEXT_FAULTS["preferences of a part of each row"],
        **{**PREFERENCES, **LORA, **CP, "training.micro_batch_size": 2},
    ),
    "DPO reference with its adapter": _of(
        PREFERENCE_FAULTS["DPO reference with its adapter"],
        **{**PREFERENCES, **LORA, **DP, "training.micro_batch_size": 2},
    ),
}

# How the verdict begins, with the quantity and tensor that it must name -> the faults.
_NAMED: dict[str, tuple[str, ...]] = {
    "loss,": (
        "label smoothing over the shard's vocabulary",
        "loss off by the logarithm of the tensor ranks",
        "accumulation as a mean of means",
        "loss normalised by the rank's own tokens",
        "a pipeline keeps the last micro batch",
        "loss of every context rank",
        "loss reported once a tensor rank",
        "z-loss of the shard's vocabulary",
        "labels are the next local tokens",
        "loss mask of the first share",
        "preferences of a part of each row",
        "DPO reference with its adapter",
    ),
    "gradient norm,": (
        "norm without the sinks of attention",
        "norm without the norms' weights",
        "norm without the experts of other ranks",
        "tied head counted twice in the norm",
        "replicated norms counted once a tensor rank",
        "DeepSpeed's norm counts replicas",
        "ZeRO 2 drops micro steps that it has reduced",
        "norm of one stage",
        "norm of every copy of experts",
    ),
    "gradient before the sum of lm_head": (
        "ZeRO 1 drops micro steps",
        "ZeRO 1 with offload drops micro steps",
        "context gradients summed over data ranks only",
        "a weight gradient of a split backward lost",
    ),
    "gradient before the sum of model.embed_tokens": (
        "tied copies that drift",
        "tied copies that drift under ZeRO",
        "tied weight of a V summed as if it were two",
    ),
    "output of model.layers.1,": (
        "30 layers on 4 stages train 28",
        "a dropped chunk",
    ),
    "gradient before the sum of model.layers.1.mlp.down_proj": (
        "fresh dropout in recompute",
        "gradients summed over data-parallel ranks in the first backward",
    ),
    "output of model.embed_tokens": (
        "dropout of another rank's stream",
        "missing all-reduce of row-parallel outputs",
        "dropout keyed by the rank's own samples",
        "dropout keyed by the rank's own positions",
        "residual dropout by local positions",
    ),
    "output of model.layers.0.self_attn": (
        "packed documents seen over context ranks",
        "two chunks swapped",
        "documents of the first micro batch for all",
        "attention dropout keyed by the rank's own heads",
        "fused attention dropout without the head in its key",
        "LoRA scaled by the rank over tp",
        "adapter dropout keyed by the rank's own features",
        "positions begin anew on each rank",
        "keys in the order of ranks",
        "documents shifted by a token",
        "attention dropout by local positions",
        "masks of the first heads",
        "sink of every context rank",
        "prefix positions forgotten",
    ),
    "gradient before the sum of model.norm.weight": (
        "missing all-reduce of column-parallel input gradients",
        "norm weights' gradients of own positions only",
        "norm weights' gradients of own positions reduced by ZeRO",
        "sequence gather whose backward only splits",
    ),
    "initial weights of model.embed_tokens": ("weights initialised alike on two shards",),
    "gradient of lm_head": ("missing sum over data-parallel ranks",),
    "gradient before the sum of model.layers.0.mlp.down_proj": (
        "gradients summed over data-parallel ranks a layer too early",
    ),
    "gradient before the sum of model.layers.1.self_attn.k_norm": (
        "head norms' gradients of own heads only",
    ),
    "gradient before the sum of model.layers.1.self_attn.v_proj": (
        "shared key-value heads' gradients of own queries only",
    ),
    "output of model.layers.0.mlp": (
        "dropout keyed by the rank's own features",
        "shared experts of each tensor rank",
    ),
    "gradient before the sum of model.layers.1.mlp.down_proj.lora_B": (
        "LoRA whose A has the gradient of one rank's rows",
    ),
    "initial weights of model.layers.0.self_attn.o_proj.lora_magnitude": (
        "DoRA with the row norms of a rank's own columns",
    ),
    "output of model.embed_tokens,": ("every data rank reads the same rows",),
    "weights of model.layers.0.mlp.gate_proj": ("groups of parameters forgotten",),
    "optimizer state ema of model.embed_tokens": ("moving average of the first step",),
    "weights of model.layers.0.self_attn.q_proj": (
        "Newton-Schulz on a shard",
        "Newton-Schulz on a fused weight",
    ),
    "optimizer state row_var of model.layers.0.self_attn.o_proj": (
        "second moments of a shard's rows and columns",
    ),
    "output of model.layers.0": ("tokens back as contiguous shares",),
    "gradient of model.layers.1.mlp.experts": (
        "mean over the copies of experts",
        "experts not summed over their copies",
    ),
    "gradient before the sum of model.layers.1.mlp.gate.": (
        "balance of a rank's own positions",
        "router losses of each data rank",
        "router losses not attached",
        "router's gradient of a rank's own positions",
    ),
    "output of model.layers.1.mlp": (
        "rows not sorted after the exchange",
        "weights of another choice",
    ),
    "gradient before the sum of model.layers.1.mlp.experts": (
        "gradients of rows in the order of the forward",
    ),
    "initial weights of model.layers.1.mlp.experts.4": ("experts drawn by their place on the rank",),
    "gradient before the sum of model.layers.1.self_attn.kv_a_proj_with_mqa": (
        "rotated key of each tensor rank",
    ),
    "gradient before the sum of model.layers.1.self_attn.q_a_layernorm": (
        "latent norm of a rank's own positions",
    ),
    "gradient before the sum of model.layers.1.mlp.experts.4.down_proj.bias": (
        "down bias of every tensor rank",
        "biases of another expert",
    ),
    "gradient before the sum of model.prefix.hidden": (
        "prefix trunk's gradients of own heads only",
        "prefix trunk's gradients of the own stage only",
    ),
}
NAMED = {fault: beginning for beginning, faults in _NAMED.items() for fault in faults}


@contextmanager
def planted_run_fault(name: str | None) -> Iterator[None]:
    """Run with a fault of PAINS or MORE planted; None: without a fault."""
    if name is None:
        yield
        return
    fault = {**PAINS, **MORE}[name]
    original = getattr_static(fault.target, fault.attribute)
    with mock.patch.object(fault.target, fault.attribute, fault.replace(original)):
        yield
