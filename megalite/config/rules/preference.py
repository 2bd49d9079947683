"""Rules over [preference] and data.kind = "preference": pairs of rows, and what their loss cannot be combined with."""

from collections.abc import Iterator

from megalite.config.rules.batch import BatchProblem, plan_batch
from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.preference_section import PreferenceConfig
from megalite.config.sections.toml import shown
from megalite.errors import Problem

_SIZE, _GLOBAL = "training.micro_batch_size", "training.global_batch_size"


def settings_of_preferences_need_some(run: CheckedRun) -> Iterator[Problem]:
    if run.data.kind == "preference":
        return
    for name, field in PreferenceConfig.model_fields.items():
        if getattr(run.preference, name) != field.default:
            message = f'has no effect with data.kind = "{run.data.kind}"'
            yield Problem.reset(f"preference.{name}", message, 'delete it, or set data.kind = "preference"')


def micro_batches_hold_pairs(run: CheckedRun) -> Iterator[Problem]:
    if run.data.kind != "preference":
        return
    try:
        plan = plan_batch(run)
    except BatchProblem:
        return
    if plan.micro_batch_size % 2 == 0:
        return
    rows = "the chosen and the rejected answer of a pair are two rows of one micro batch"
    if run.training.micro_batch_size is not None:
        least = plan.micro_batch_size + 1
        yield Problem.reset(_SIZE, f"{plan.micro_batch_size} is odd, but {rows}", f"use {least}", least)
    else:
        whole = 2 * plan.micro_batches * plan.data
        nearest = -(-plan.global_batch_size // whole) * whole
        message = f"{plan.global_batch_size} gives micro batches of {plan.micro_batch_size}, but {rows}"
        yield Problem.reset(_GLOBAL, message, f"use {nearest}", nearest)


def preferences_have_no_loss_of_tokens(run: CheckedRun) -> Iterator[Problem]:
    if run.data.kind != "preference":
        return
    for key, value, remedy in (
        (
            "training.label_smoothing",
            run.training.label_smoothing,
            "delete it, or set preference.label_smoothing",
        ),
        ("training.z_loss", run.training.z_loss, "delete it"),
    ):
        if value:
            message = (
                f"{value:g} changes the loss of tokens, but preferences compare log-probabilities of answers"
            )
            yield Problem.reset(key, message, remedy)


def pairs_are_kept_whole(run: CheckedRun) -> Iterator[Problem]:
    if run.data.kind == "preference" and run.data.min_length:
        message = f"{run.data.min_length} would leave out one answer of a pair"
        yield Problem.reset("data.min_length", message, "delete it, or leave such pairs out of the data")


def label_smoothing_is_of_the_sigmoid(run: CheckedRun) -> Iterator[Problem]:
    preference = run.preference
    if preference.loss != "sigmoid" and preference.label_smoothing:
        message = (
            f"{preference.label_smoothing:g} has no effect with preference.loss = {shown(preference.loss)}"
        )
        yield Problem.reset(
            "preference.label_smoothing", message, 'delete it, or set preference.loss = "sigmoid"'
        )


def chunked_losses_of_pairs_have_a_frozen_head(run: CheckedRun) -> Iterator[Problem]:
    key = "model.chunked_loss" if run.model.chunked_loss else "training.sequence_chunk"
    chunk, adapter = run.model.chunked_loss or run.training.sequence_chunk, run.adapter
    frozen = adapter.kind != "none" and not adapter.modules_to_save
    if run.data.kind != "preference" or not chunk or frozen:
        return
    message = f"{chunk} computes the head's gradient before the loss of the pair, which weighs it, is known"
    yield Problem.reset(key, message, 'delete it, or set adapter.kind = "lora", which freezes the head')
