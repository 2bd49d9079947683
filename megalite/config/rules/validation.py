"""The rules over [validation] and what rests on it, and over steps that are left out."""

from collections.abc import Iterator

from megalite.config.toml import shown
from megalite.config.validate import Facts
from megalite.errors import Problem


def has_held_out_text(facts: Facts) -> bool:
    split = facts.data.split
    return facts.data.validation is not None or (split is not None and len(split) > 1 and split[1] > 0)


def validation_has_text(facts: Facts) -> Iterator[Problem]:
    if has_held_out_text(facts):
        return
    asked = {name: getattr(facts.validation, name) for name in ("every", "at_start", "samples", "patience")}
    for name, value in asked.items():
        if value:
            message = f"{shown(value)} stands without held-out text"
            yield Problem(
                f"validation.{name}", message, "set data.validation, or data.split, or leave it out"
            )
            return


def patience_needs_validations(facts: Facts) -> Iterator[Problem]:
    if facts.validation.patience is not None and facts.validation.every is None:
        message = f"{facts.validation.patience} counts validations, and there is only the last"
        yield Problem("validation.patience", message, "set validation.every")


def improvement_is_for_patience(facts: Facts) -> Iterator[Problem]:
    if facts.validation.minimum_improvement and facts.validation.patience is None:
        message = f"{facts.validation.minimum_improvement:g} has no meaning without patience"
        yield Problem("validation.minimum_improvement", message, "set validation.patience, or leave it out")


def best_checkpoint_needs_text(facts: Facts) -> Iterator[Problem]:
    if facts.checkpoint.best and not has_held_out_text(facts):
        message = "true stands without held-out text, whose loss says which is the best"
        yield Problem("checkpoint.best", message, "set data.validation, or data.split")


def best_export_needs_its_checkpoint(facts: Facts) -> Iterator[Problem]:
    if facts.checkpoint.export == "best" and not facts.checkpoint.best:
        yield Problem(
            "checkpoint.export", '"best" stands without a best checkpoint', "set checkpoint.best = true"
        )


def keeping_some_means_deleting_others(facts: Facts) -> Iterator[Problem]:
    if facts.checkpoint.keep_every is not None and facts.checkpoint.keep_last is None:
        message = f"{facts.checkpoint.keep_every} has no meaning where no checkpoint is deleted"
        yield Problem("checkpoint.keep_every", message, "set checkpoint.keep_last, or leave it out")


def loss_scale_skips_by_itself(facts: Facts) -> Iterator[Problem]:
    if facts.training.nonfinite == "skip" and facts.training.precision == "fp16":
        message = (
            '"skip" stands beside training.precision = "fp16", whose loss scale leaves steps out by itself'
        )
        yield Problem("training.nonfinite", message, 'use "stop", which then means: at the smallest scale')


VALIDATION_RULES = (
    validation_has_text,
    patience_needs_validations,
    improvement_is_for_patience,
    best_checkpoint_needs_text,
    best_export_needs_its_checkpoint,
    keeping_some_means_deleting_others,
    loss_scale_skips_by_itself,
)
