"""All rules over several settings or the number of ranks; each is a function that yields its problems."""

from collections.abc import Callable, Iterator

from megalite.config.facts import Facts, Unknown
from megalite.config.rules.batch import BATCH_RULES
from megalite.config.rules.computation import COMPUTATION_RULES
from megalite.config.rules.data import DATA_RULES
from megalite.config.rules.layout import LAYOUT_RULES
from megalite.config.rules.model import MODEL_RULES
from megalite.config.rules.optimizer import OPTIMIZER_RULES
from megalite.config.rules.pipeline import PIPELINE_RULES
from megalite.config.rules.training import TRAINING_RULES
from megalite.config.rules.validation import VALIDATION_RULES
from megalite.errors import Problem

Rule = Callable[[Facts], Iterator[Problem]]


def problems_of(facts: Facts) -> list[Problem]:
    """Return the problems of all rules, skipping each rule that reads an invalid or missing setting."""
    found: list[Problem] = []
    for rule in RULES:
        try:
            found += rule(facts)
        except Unknown:
            continue
    return found


RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    *MODEL_RULES,
    *PIPELINE_RULES,
    *BATCH_RULES,
    *COMPUTATION_RULES,
    *TRAINING_RULES,
    *OPTIMIZER_RULES,
    *DATA_RULES,
    *VALIDATION_RULES,
)
