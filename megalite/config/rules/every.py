"""All rules over several settings or the number of ranks; each is a function that yields its problems."""

from collections.abc import Callable, Iterator

from megalite.config.rules.adapter import ADAPTER_NOTES, ADAPTER_RULES
from megalite.config.rules.batch import BATCH_RULES
from megalite.config.rules.computation import COMPUTATION_NOTES, COMPUTATION_RULES
from megalite.config.rules.data import DATA_RULES
from megalite.config.rules.layout import LAYOUT_RULES
from megalite.config.rules.model import MODEL_RULES
from megalite.config.rules.optimizer import OPTIMIZER_NOTES, OPTIMIZER_RULES
from megalite.config.rules.pipeline import PIPELINE_RULES
from megalite.config.rules.places import PLACE_RULES
from megalite.config.rules.preference import PREFERENCE_RULES
from megalite.config.rules.streaming import STREAMING_RULES
from megalite.config.rules.training import TRAINING_RULES
from megalite.config.rules.validation import VALIDATION_RULES
from megalite.config.sections.checked import Facts, Unknown
from megalite.errors import Problem

Rule = Callable[[Facts], Iterator[Problem]]


def problems_of(facts: Facts, *, places: bool = False) -> list[Problem]:
    """Return the problems of all rules, skipping each rule that reads an invalid or missing setting.

    places: apply the rules over the files and folders of this machine too.
    """
    found: list[Problem] = []
    for rule in (*RULES, *(PLACE_RULES if places else ())):
        try:
            found += rule(facts)
        except Unknown:
            continue
    return found


def notes_of(facts: Facts) -> list[str]:
    """Return messages about costs and settings without effect, for a run without problems."""
    return [note for notes in (*COMPUTATION_NOTES, *OPTIMIZER_NOTES, *ADAPTER_NOTES) for note in notes(facts)]


RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    *MODEL_RULES,
    *ADAPTER_RULES,
    *PIPELINE_RULES,
    *BATCH_RULES,
    *COMPUTATION_RULES,
    *TRAINING_RULES,
    *OPTIMIZER_RULES,
    *DATA_RULES,
    *STREAMING_RULES,
    *PREFERENCE_RULES,
    *VALIDATION_RULES,
)
