"""The rules over [validation] and what rests on it: held-out text, patience."""

from collections.abc import Iterator

from megalite.config.toml import shown
from megalite.config.validate import Facts
from megalite.errors import Problem


def validation_has_text(facts: Facts) -> Iterator[Problem]:
    split = facts.data.split
    if facts.data.validation is not None or (split is not None and len(split) > 1 and split[1] > 0):
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


VALIDATION_RULES = (validation_has_text, patience_needs_validations, improvement_is_for_patience)
