"""Rules over [validation] and [checkpoint], and over skipped steps."""

from collections.abc import Iterator

from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.duration import epochs_of
from megalite.config.sections.text_sections import ValidationConfig
from megalite.config.sections.toml import shown
from megalite.errors import Problem


def has_validation_text(run: CheckedRun) -> bool:
    """Whether data.validation or the second share of data.split gives validation text."""
    split = run.data.split
    return run.data.validation is not None or (split is not None and len(split) > 1 and split[1] > 0)


def validation_has_text(run: CheckedRun) -> Iterator[Problem]:
    if has_validation_text(run):
        return
    for name in ValidationConfig.model_fields:
        if value := getattr(run.validation, name):
            message = f"{shown(value)} needs validation text"
            yield Problem.reset(
                f"validation.{name}", message, "set data.validation or data.split, or delete the setting"
            )
            return


def patience_needs_validations(run: CheckedRun) -> Iterator[Problem]:
    if run.validation.patience is not None and run.validation.every is None:
        message = f"{run.validation.patience} has no effect: the only validation is after the last step"
        yield Problem(
            "validation.patience", message, "set validation.every, for example 100", {"validation.every": 100}
        )


def improvement_is_for_patience(run: CheckedRun) -> Iterator[Problem]:
    if run.validation.minimum_improvement and run.validation.patience is None:
        message = f"{run.validation.minimum_improvement:g} has no effect without validation.patience"
        yield Problem.reset(
            "validation.minimum_improvement", message, "set validation.patience, or delete the setting"
        )


def best_checkpoint_needs_text(run: CheckedRun) -> Iterator[Problem]:
    if run.checkpoint.best and not has_validation_text(run):
        message = "true needs validation text, whose loss decides which checkpoint is the best"
        yield Problem(
            "checkpoint.best", message, "set data.validation or data.split", {"data.split": [0.98, 0.02]}
        )


def best_export_needs_its_checkpoint(run: CheckedRun) -> Iterator[Problem]:
    if run.checkpoint.export == "best" and not run.checkpoint.best:
        yield Problem(
            "checkpoint.export",
            '"best" needs a best checkpoint',
            "set checkpoint.best = true",
            {"checkpoint.best": True},
        )


def keeping_some_means_deleting_others(run: CheckedRun) -> Iterator[Problem]:
    if run.checkpoint.keep_every is not None and run.checkpoint.keep_last is None:
        message = f"{run.checkpoint.keep_every} has no effect: no checkpoint is deleted"
        yield Problem.reset(
            "checkpoint.keep_every", message, "set checkpoint.keep_last, or delete the setting"
        )


def intervals_are_steps_or_epochs(run: CheckedRun) -> Iterator[Problem]:
    for key, every in {
        "validation.every": run.validation.every,
        "checkpoint.every": run.checkpoint.every,
    }.items():
        if not isinstance(every, str):
            continue
        try:
            epochs_of(every)
        except ValueError as error:
            remedy = 'write a number of steps, or epochs as in "1 epoch" or "0.5 epochs"'
            yield Problem(key, f"{shown(every)} {error}", remedy)
            continue
        for setting, counts_steps in {
            "data.streaming = true": run.data.streaming,
            'data.order = "megatron"': run.data.order == "megatron",
        }.items():
            if counts_steps:
                yield Problem(key, f"{shown(every)} has no meaning with {setting}", "write a number of steps")


def loss_scale_skips_by_itself(run: CheckedRun) -> Iterator[Problem]:
    if run.training.nonfinite != "stop" and run.training.precision == "fp16":
        message = (
            f'{shown(run.training.nonfinite)} has no effect with training.precision = "fp16", whose loss scale skips'
            " such steps itself"
        )
        remedy = 'use "stop", which ends the run at training.minimum_loss_scale'
        yield Problem.reset("training.nonfinite", message, remedy, "stop")


def rollback_needs_checkpoints(run: CheckedRun) -> Iterator[Problem]:
    for name in ("nonfinite", "loss_spike"):
        if getattr(run.training, name) == "rollback" and run.checkpoint.every is None:
            message = '"rollback" needs checkpoints: the only one is after the last step'
            remedy = "set checkpoint.every, for example 100"
            yield Problem(f"training.{name}", message, remedy, {"checkpoint.every": 100})
