"""Rules over [adapter]: the linears that it names, where its weights come from, and what PEFT's files can say."""

from collections.abc import Iterator

from megalite.config.peft_names import fused_with_others
from megalite.config.rules.pipeline import split_of
from megalite.config.sections.adapter_section import SETTINGS_OF, AdapterConfig, described_adapter
from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.derived import adapted_shape
from megalite.config.sections.shape_settings import model_shape
from megalite.config.sections.toml import shown
from megalite.errors import Problem, listed
from megalite.topology.adapter import Lora, Prefix, names_module
from megalite.topology.parameters import Parameter, model_parameters, names_tied_table, stage_parameters

_OR_ROUTER = "; a router has no adapter"


def settings_belong_to_an_adapter(run: CheckedRun) -> Iterator[Problem]:
    if "adapter" in run.incomplete:
        return
    kind, fields = run.adapter.kind, AdapterConfig.model_fields
    idle = {"path": "lora"} if kind == "none" else {}
    idle |= {name: other for other, names in SETTINGS_OF.items() if other != kind for name in names}
    for name, other in idle.items():
        if getattr(run.adapter, name) != fields[name].default:
            message = f'has no effect with adapter.kind = "{kind}"'
            yield Problem.reset(
                f"adapter.{name}", message, f'set adapter.kind = "{other}", or delete the setting'
            )


def an_adapter_has_a_model(run: CheckedRun) -> Iterator[Problem]:
    if run.adapter.kind != "none" and run.model.weights is None:
        message = f"{shown(run.adapter.kind)} needs a pretrained model, whose weights stay as they are"
        yield Problem.reset("adapter.kind", message, 'set model.weights, or use "none"', "none")


def a_prefix_does_not_go_round(run: CheckedRun) -> Iterator[Problem]:
    ring = run.parallel.context > 1 and run.parallel.context_method == "ring"
    if ring and isinstance(described_adapter(run.adapter), Prefix):
        message = '"ring" has no place for the virtual tokens of an adapter, which every rank has'
        yield Problem.reset("parallel.context_method", message, 'use "gather" or "ulysses"', "gather")


def adapter_patterns_name_modules(run: CheckedRun) -> Iterator[Problem]:
    adapter = described_adapter(run.adapter)
    if not isinstance(adapter, Lora):
        return
    shape = model_shape(run.model, 1)
    own = model_parameters(shape)
    within = _modules(each for each in own if each.takes_lora)
    if run.adapter.targets != "all":
        words = list(dict.fromkeys(each.rsplit(".", 1)[-1] for each in within))
        for pattern in adapter.targets:
            if not any(names_module([pattern], module) for module in within):
                yield Problem.reset(
                    "adapter.targets",
                    f"{shown(pattern)} names no linear of a layer" + _OR_ROUTER * bool(run.model.num_experts),
                    f"use {', '.join(words)}",
                    words,
                )
    outside = _modules(each for each in own if each.layer is None)
    words = [module.rsplit(".", 1)[-1] for module in outside if not names_tied_table(module, shape)]
    for pattern in adapter.modules_to_save:
        others = {"adapter.modules_to_save": [name for name in adapter.modules_to_save if name != pattern]}
        if names_tied_table(pattern, shape):
            message = f"{shown(pattern)} is the embedding and the head at once (model.tie_word_embeddings)"
            remedy = "leave it out" if run.adapter.path is None else "use another adapter"
            yield Problem(
                "adapter.modules_to_save", message, f"{remedy}: PEFT would train two copies", others
            )
        elif not any(names_module([pattern], module) for module in outside):
            message = f"{shown(pattern)} names no module outside of the layers"
            yield Problem(
                "adapter.modules_to_save", message, f"use {', '.join(words)}, or adapter.targets", others
            )


def _modules(parameters: Iterator[Parameter]) -> list[str]:
    return list(dict.fromkeys(part.name.rsplit(".", 1)[0] for each in parameters for part in each.spec.parts))


def biases_are_trained_whole(run: CheckedRun) -> Iterator[Problem]:
    adapter = described_adapter(run.adapter)
    if not isinstance(adapter, Lora) or adapter.bias != "lora_only":
        return
    for parameter in model_parameters(model_shape(run.model, 1)):
        modules = [part.name.removesuffix(".bias") for part in parameter.spec.parts]
        if not parameter.name.endswith(".bias") or parameter.layer is None:
            continue
        adapted = [each for each in modules if adapter.adapts(each)]
        if adapted and len(adapted) < len(modules):
            missing = [each.rsplit(".", 1)[-1] for each in modules if each not in adapted]
            message = (
                f'"lora_only" with {adapted[0]} needs {listed(missing)} too: their biases are one parameter'
            )
            yield Problem.reset(
                "adapter.bias", message, 'add them to adapter.targets, or use "none" or "all"', "none"
            )
            return


def every_stage_trains_something(run: CheckedRun) -> Iterator[Problem]:
    adapter, stages = described_adapter(run.adapter), run.parallel.pipeline
    if adapter is None:
        return
    split = split_of(run)
    if split is None:
        return
    shape = adapted_shape(run)
    idle = [
        stage
        for stage in range(stages)
        if not any(each.trained for each in stage_parameters(shape, split, stage))
    ]
    if idle and stages > 1:
        message = f"adapts no linear of stage {idle[0]} of parallel.pipeline = {stages}"
        yield Problem("adapter.targets", message, "name linears in the layers of every stage")


def added_tokens_have_trained_rows(run: CheckedRun) -> Iterator[Problem]:
    if run.adapter.kind != "none" and run.tokenizer.add_tokens:
        message = "are not supported with an adapter: their rows of the embedding would stay as they begin"
        yield Problem.reset("tokenizer.add_tokens", message, 'use adapter.kind = "none", or leave them out')


def an_adapter_can_be_exported(run: CheckedRun) -> Iterator[Problem]:
    adapter = described_adapter(run.adapter)
    if not isinstance(adapter, Lora) or not run.checkpoint.export:
        return
    fused = fused_with_others(adapted_shape(run))
    if fused is not None:
        message = (
            f"PEFT's files cannot say it: {run.model.family} holds an adapted linear in {fused}, with others"
        )
        message += " or transposed"
        remedy = (
            "set checkpoint.export = false; megalite convert export writes the model with its adapter merged"
        )
        yield Problem("adapter.kind", message, remedy, {"checkpoint.export": False})


def ranks_above_every_matrix(run: CheckedRun) -> Iterator[str]:
    adapter = described_adapter(run.adapter)
    if not isinstance(adapter, Lora):
        return
    linears = [
        part
        for parameter in model_parameters(model_shape(run.model, 1))
        if parameter.takes_lora
        for part in parameter.spec.parts
        if adapter.adapts(part.name.removesuffix(".weight"))
    ]
    largest = max((min(part.shape) for part in linears), default=adapter.rank)
    if adapter.rank > largest:
        yield (
            f"adapter.rank = {adapter.rank:,} is above the smaller side of every adapted matrix, {largest:,} at most: "
            f"the adapter has more values than these updates need; {largest:,} can express all of them"
        )
