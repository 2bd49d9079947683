"""Rules over mixtures of experts: their sizes, what their layers cannot do, and the losses of their routers."""

import re
from collections import Counter
from collections.abc import Iterator

from megalite.config.peft_names import adapted_linears, beyond_transformers_5
from megalite.config.rules.pipeline import split_of
from megalite.config.sections.adapter_section import described_adapter
from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.derived import adapted_shape
from megalite.config.sections.schema import ModelConfig
from megalite.config.sections.shape_settings import model_shape
from megalite.config.sections.toml import shown
from megalite.errors import Problem
from megalite.families.fields import EXPERT_SETTINGS
from megalite.topology.adapter import Lora
from megalite.topology.experts import EXPERT_AXIS, ExpertShape, MixtureShape
from megalite.topology.parameters import stage_parameters
from megalite.topology.sharding import divisors

_NUMBER = "model.num_experts"
_EXPERT = re.compile(r"\.\d+\.(?=[^.]+$)")
_OF_ROUTERS = ("router_balance", "router_z", "router_bias_rate")


def settings_of_experts_have_experts(run: CheckedRun) -> Iterator[Problem]:
    if run.model.num_experts:
        return
    remedy = f"set {_NUMBER}, or delete the setting"
    for name in EXPERT_SETTINGS.values():
        if getattr(run.model, name) != ModelConfig.model_fields[name].default:
            yield Problem.reset(f"model.{name}", f"has no effect without {_NUMBER}", remedy)
    for name in _OF_ROUTERS:
        if getattr(run.training, name):
            yield Problem.reset(f"training.{name}", f"has no effect without {_NUMBER}", remedy)


def experts_have_their_sizes(run: CheckedRun) -> Iterator[Problem]:
    number = run.model.num_experts
    for name, usual in (
        ("num_experts_per_tok", min(2, number)),
        ("moe_intermediate_size", run.model.intermediate_size),
    ):
        if number and getattr(run.model, name) is None:
            message = f"is required with {_NUMBER} = {number}"
            yield Problem.reset(f"model.{name}", message, f"set it, as in {usual}", usual)


def tokens_find_their_experts(run: CheckedRun) -> Iterator[Problem]:
    model = run.model
    number, top, groups, best = (
        model.num_experts,
        model.num_experts_per_tok,
        model.n_group,
        model.topk_group,
    )
    if not number or top is None:
        return
    # The score of a group of sigmoids is the sum of its two best experts.
    least = 2 if _experts(run).router_scores == "sigmoid" and groups > 1 else 1
    if top > number:
        message = f"{top} is more than {_NUMBER} = {number}"
        yield Problem.reset("model.num_experts_per_tok", message, f"use at most {number}", number)
    elif number % groups or number // groups < least:
        message = f"{groups} does not divide {_NUMBER} = {number} into groups of {least} or more"
        fitting = [size for size in divisors(number) if number // size >= least]
        nearest = max((size for size in fitting if size <= groups), default=1)
        yield Problem.reset("model.n_group", message, f"use one of {fitting}", nearest)
    elif best > groups:
        message = f"{best} is more than model.n_group = {groups}"
        yield Problem.reset("model.topk_group", message, f"use at most {groups}", groups)
    elif top > (most := best * number // groups):
        message = f"{top} is more than the {most} experts of model.topk_group = {best} groups"
        yield Problem.reset("model.num_experts_per_tok", message, f"use at most {most}", most)


def some_layers_have_experts(run: CheckedRun) -> Iterator[Problem]:
    shape = model_shape(run.model, 1)
    layers, dense = shape.num_hidden_layers, run.model.mlp_only_layers
    if not run.model.num_experts:
        return
    if beyond := [layer for layer in dense if layer >= layers]:
        message = f"{beyond[0]} is none of the layers 0 to {layers - 1}"
        fewer = [layer for layer in dense if layer < layers]
        yield Problem.reset("model.mlp_only_layers", message, f"use {shown(fewer)}", fewer)
    elif not any(shape.has_experts(layer) for layer in range(layers)):
        names = ("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")
        places = [
            name for name in names if getattr(run.model, name) != ModelConfig.model_fields[name].default
        ]
        message = f"no layer of {layers} has experts: all keep the dense MLP"
        remedy = f"delete {' and '.join(f'model.{name}' for name in places)}, or {_NUMBER}"
        yield Problem(_NUMBER, message, remedy, {f"model.{name}": None for name in places})


def experts_are_gated_by_silu(run: CheckedRun) -> Iterator[Problem]:
    shape = model_shape(run.model, 1)
    if not run.model.num_experts:
        return
    for name, built in (("gated_mlp", True), ("hidden_act", "silu"), ("mlp_bias", False)):
        if (value := getattr(shape, name)) != built:
            message = f"{shown(value)} does not work with {_NUMBER} = {run.model.num_experts}: an expert is "
            message += "down(silu(gate(x)) * up(x)), with biases by model.expert_bias"
            yield Problem.reset(f"model.{name}", message, f"use {shown(built)}", built)


def experts_have_no_dropout(run: CheckedRun) -> Iterator[Problem]:
    if run.model.num_experts and run.model.mlp_dropout:
        message = f"{run.model.mlp_dropout} does not work with {_NUMBER} = {run.model.num_experts}"
        remedy = "use model.residual_dropout, on the output of all experts together"
        yield Problem.reset("model.mlp_dropout", message, remedy)


def experts_have_whole_sequences(run: CheckedRun) -> Iterator[Problem]:
    chunk = run.training.sequence_chunk
    if run.model.num_experts and chunk:
        message = (
            f"{chunk} does not work with {_NUMBER} = {run.model.num_experts}: experts take whole sequences"
        )
        remedy = f"delete the setting, or set model.chunked_loss = {chunk} for the loss alone"
        yield Problem.reset("training.sequence_chunk", message, remedy)


def experts_are_not_compiled(run: CheckedRun) -> Iterator[Problem]:
    if run.model.num_experts and run.training.compile:
        message = f"true does not work with {_NUMBER} = {run.model.num_experts}: the sizes of the experts' products "
        message += "change from step to step"
        yield Problem.reset("training.compile", message, "use training.compile = false", False)


def experts_are_adapted_alike(run: CheckedRun) -> Iterator[Problem]:
    adapter, shape = described_adapter(run.adapter), adapted_shape(run)
    if not isinstance(adapter, Lora) or not run.model.num_experts:
        return
    of_layers = Counter(
        _EXPERT.sub(".*.", module) for module, of_expert in adapted_linears(shape) if of_expert
    )
    for linear, number in of_layers.items():
        if number < run.model.num_experts:
            message = f"names {number} of the {run.model.num_experts} experts in {linear}"
            everywhere = "*.experts.*." + linear.rpartition(".")[-1]
            remedy = f'name all experts of a layer, as in "{everywhere}"'
            yield Problem.reset("adapter.targets", message, remedy, [everywhere])
            return
    for name in ("dropout", "dora"):
        if of_layers and (value := getattr(run.adapter, name)):
            message = f"{shown(value)} does not work with adapters of experts ({next(iter(of_layers))}), nor in PEFT"
            remedy = "delete the setting, or name other linears in adapter.targets"
            yield Problem.reset(f"adapter.{name}", message, remedy)


def peft_reads_adapters_of_experts(run: CheckedRun) -> Iterator[str]:
    adapter = described_adapter(run.adapter)
    if not isinstance(adapter, Lora) or not run.model.num_experts or not run.checkpoint.export:
        return
    if (lost := beyond_transformers_5(adapted_shape(run))) is not None:
        yield (
            f"adapter.targets names {lost}: PEFT with transformers 5 does not load this adapter as a whole, since a "
            "layer's experts are one module there; megalite convert export writes the merged model"
        )


def router_biases_are_there_to_change(run: CheckedRun) -> Iterator[Problem]:
    rate = run.training.router_bias_rate
    if not rate or not run.model.num_experts:
        return
    reason = ""
    if run.adapter.kind != "none":
        reason = f"changes a weight of the model, but adapter.kind = {shown(run.adapter.kind)} trains none"
    elif not _experts(run).correction_bias:
        reason = "has no effect without model.router_correction_bias = true"
    if reason:
        remedy = "use training.router_balance, or delete the setting"
        yield Problem.reset("training.router_bias_rate", f"{rate} {reason}", remedy)


def zero_finds_as_many_experts_on_every_rank(run: CheckedRun) -> Iterator[Problem]:
    # Without this rule ZeRO 2 hangs in its first sum, and gloo ends ZeRO 3 with "Received data size doesn't match" once
    # weights outgrow stage3_prefetch_bucket_size.
    number, ranks, stage = run.model.num_experts, run.parallel.expert, run.zero_stage
    if stage >= 2 and number and number % ranks:
        buckets = "reduces buckets of gradients" if stage == 2 else "gathers buckets of weights"
        message = (
            f"{ranks} ranks cannot have as many of {_NUMBER} = {number} each, but ZeRO {stage} {buckets} that must be "
            "the same on all"
        )
        fitting = divisors(number)
        nearest = max(size for size in fitting if size <= ranks)
        remedy = f"use one of {fitting}, or deepspeed.zero_optimization.stage 1"
        yield Problem.reset("parallel.expert", message, remedy, nearest)


def zero_finds_experts_on_every_stage(run: CheckedRun) -> Iterator[Problem]:
    """DeepSpeed's norm is one collective per group over all stages, as the groups of `optimizer.groups`."""
    stages, split = run.parallel.pipeline, split_of(run)
    if not run.zero_stage or stages == 1 or split is None or not _apart(run):
        return
    shape = model_shape(run.model, 1)
    for stage in range(stages):
        if all(each.spec.axis != EXPERT_AXIS for each in stage_parameters(shape, split, stage)):
            message = (
                f"{run.zero_stage} needs experts on each of the {stages} stages of the pipeline, but stage "
            )
            message += f"{stage} has dense layers only"
            remedy = "use 0, or other stages (parallel.pipeline, parallel.layers_per_stage)"
            yield Problem.reset("deepspeed.zero_optimization.stage", message, remedy, 0)
            return


def zero_trains_experts_on_every_stage(run: CheckedRun) -> Iterator[Problem]:
    """As above: DeepSpeed's groups are those of trained experts, which an adapter may have on some stages alone."""
    stages, split = run.parallel.pipeline, split_of(run)
    if not run.zero_stage or stages == 1 or split is None or run.adapter.kind == "none" or not _apart(run):
        return
    shape = adapted_shape(run)
    trains = [
        any(each.trained and each.spec.axis == EXPERT_AXIS for each in stage_parameters(shape, split, stage))
        for stage in range(stages)
    ]
    if any(trains) and not all(trains):
        bare = trains.index(False)
        message = f"name experts on some of the {stages} stages of the pipeline, but none on stage {bare}"
        remedy = (
            "name experts in layers of every stage, or of none, or use deepspeed.zero_optimization.stage 0"
        )
        yield Problem(
            "adapter.targets",
            f"{message}: ZeRO sums experts on all stages or on none",
            remedy,
            {"deepspeed.zero_optimization.stage": 0},
        )


def zero_2_scatters_sums_of_experts(run: CheckedRun) -> Iterator[Problem]:
    zero = run.deepspeed.get("zero_optimization", {})
    if run.zero_stage == 2 and zero.get("reduce_scatter", True) is False and _apart(run):
        message = f"false does not work with {_NUMBER} = {run.model.num_experts}: DeepSpeed sums experts over other "
        message += "ranks than dense weights only where it scatters"
        yield Problem.reset("deepspeed.zero_optimization.reduce_scatter", message, "use true", True)


def zero_3_has_no_router_biases(run: CheckedRun) -> Iterator[Problem]:
    if run.zero_stage == 3 and run.model.num_experts and _experts(run).correction_bias:
        message = "3 partitions model.router_correction_bias, which no optimizer changes"
        yield Problem.reset("deepspeed.zero_optimization.stage", message, "use 1 or 2", 1)


def _experts(run: CheckedRun) -> ExpertShape:
    """Return the experts of a mixture, with the family's own where the run leaves them open."""
    shape = model_shape(run.model, 1)
    assert isinstance(shape, MixtureShape) and shape.experts is not None
    return shape.experts


def _apart(run: CheckedRun) -> bool:
    """Return whether experts have copies on other ranks than dense weights: DeepSpeed gets them as groups apart."""
    whole = run.parallel.expert_tensor == 1 and run.parallel.tensor > 1
    return bool(run.model.num_experts) and (run.parallel.expert > 1 or whole)


def routers_are_balanced(run: CheckedRun) -> Iterator[str]:
    balanced = run.training.router_balance or run.training.router_bias_rate
    if run.model.num_experts and not balanced and run.model.weights is None:
        yield (
            f"{_NUMBER} = {run.model.num_experts} without training.router_balance: a router that nothing balances "
            "tends to send all tokens to a few experts; 0.01 is usual"
        )
