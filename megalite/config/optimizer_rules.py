"""Rules of the update: groups of parameters, clipping by value, the average of weights, the loss scale."""

from collections.abc import Iterator

from megalite.config.schema import ModelConfig
from megalite.config.validate import Facts
from megalite.errors import Problem
from megalite.topology.parameter_groups import group_problems
from megalite.topology.parameters import model_parameters


def patterns_choose_whole_parameters(facts: Facts) -> Iterator[Problem]:
    groups = [each.group for each in facts.optimizer.groups]
    if groups:
        model = ModelConfig.model_construct(
            **{name: getattr(facts.model, name) for name in ModelConfig.model_fields}
        )
        # No name depends on the vocabulary, which a tokenizer may still have to say.
        for message in group_problems(model_parameters(model.shape(vocab_size=1)), groups):
            remedy = "choose whole parameters of the model by their Hugging Face names"
            yield Problem("optimizer.groups", message, remedy)


def values_are_clipped_without_zero(facts: Facts) -> Iterator[Problem]:
    limit, stage = facts.optimizer.clip_value, facts.zero_stage
    if limit and stage:
        message = (
            f"{limit} is not run with ZeRO {stage}: DeepSpeed clips inside its own step, and only by the norm"
        )
        yield Problem("optimizer.clip_value", message, "use optimizer.gradient_clipping")


def the_average_has_whole_runs(facts: Facts) -> Iterator[Problem]:
    decay, stage = facts.optimizer.ema_decay, facts.zero_stage
    if decay and stage == 3:
        message = f"{decay} is not run with ZeRO 3, which updates its weights where no hook of ours sees them"
        yield Problem("optimizer.ema_decay", message, "use ZeRO 1 or 2, or leave it out")


def the_stable_rate_follows_the_warmup(facts: Facts) -> Iterator[Problem]:
    optimizer = facts.optimizer
    end = optimizer.decay_steps or facts.training.steps
    if optimizer.schedule != "wsd" or end is None:
        return
    start = round(end * (1 - optimizer.decay_fraction))
    if optimizer.warmup_steps > start:
        message = (
            f"{optimizer.decay_fraction} of {end} steps starts the decay after step {start},"
            f" within the {optimizer.warmup_steps} of optimizer.warmup_steps"
        )
        yield Problem("optimizer.decay_fraction", message, "lower one of the two")


def the_loss_scale_starts_above_its_minimum(facts: Facts) -> Iterator[Problem]:
    training = facts.training
    power, minimum = training.initial_loss_scale_power, training.minimum_loss_scale
    if training.loss_scale == "dynamic" and minimum > 2**power:
        message = f"{minimum} is more than 2 ** training.initial_loss_scale_power {power} = {2**power}"
        yield Problem("training.minimum_loss_scale", message, f"use at most {2**power}")


OPTIMIZER_RULES = (
    patterns_choose_whole_parameters,
    values_are_clipped_without_zero,
    the_average_has_whole_runs,
    the_stable_rate_follows_the_warmup,
    the_loss_scale_starts_above_its_minimum,
)
