"""Keys of a row or a message that say whether to train on it: weight, train, masked and their like."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megalite.errors import DataError

_YES = {True: True, False: False}
# Key of a message (or row) -> whether each of its values says to train: OpenAI's weight, axolotl's train and training,
# ms-swift's loss, torchtune's masked.
TRAINED: dict[str, dict[Any, bool]] = {
    "weight": {0: False, 1: True},
    **dict.fromkeys(("train", "training", "loss"), _YES),
    "masked": {True: False, False: True},
}
# axolotl's: which characters of the content are trained.
_DETAILS = ("train_detail", "training_detail")


def take_train_mark(present: dict[str, Any], field: str, where: str) -> bool | None:
    """Remove the keys that say whether a message is trained, and return what they say; None: nothing."""
    for key in _DETAILS:
        if present.pop(key, None):
            raise DataError(
                f"{where}: {field}.{key} trains parts of a message, which is not supported; split the message, say "
                "train: false of it, or remove the key"
            )
    said = {key: (present.pop(key), values) for key, values in TRAINED.items() if key in present}
    for key, (value, values) in said.items():
        # 1 == True in Python, but not in JSON.
        if (
            isinstance(value, bool) != (key != "weight")
            or isinstance(value, list | dict)
            or value not in values
        ):
            raise DataError(
                f"{where}: {field}.{key} is {json.dumps(value)}, neither {' nor '.join(map(json.dumps, values))}; "
                "write one of them, or remove the key"
            )
    answers = {values[value] for value, values in said.values()}
    if len(answers) > 1:
        raise DataError(f"{where}: {field}: {' and '.join(said)} contradict each other; remove one of them")
    return answers.pop() if answers else None


def untrained_column(row: Mapping[str, Any], columns: Iterable[str] = tuple(TRAINED)) -> str | None:
    """Return the first of `columns` that says not to train on the row; None: it may be trained."""
    for key in columns:
        value = row.get(key)
        scalar = isinstance(value, bool) if key != "weight" else type(value) in (int, float)
        if scalar and TRAINED[key].get(value) is False:
            return key
    return None


def refuse_untrained(row: Mapping[str, Any], where: str, columns: Iterable[str] = tuple(TRAINED)) -> None:
    """Raise DataError for a row with a column that says not to train on it."""
    if (key := untrained_column(row, columns)) is not None:
        raise DataError(
            f"{where}: {key} is {json.dumps(row[key])}, which says not to train on the row; remove the row, or the "
            f"column {key}"
        )
