"""The base of every section of RUN.toml, and the types that several settings share."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# The limit is above any size in use, and low enough that a rule can list the divisors of a value at once.
Count = Annotated[int, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# TOML arrays are read as lists, and frozen models hold tuples.
Lenient = Field(strict=False)


def one_of(words: Iterable[str]) -> Any:
    """Return the type of a setting that takes one of these words."""
    return Literal.__getitem__(tuple(words))


class Section(BaseModel):
    """A section of RUN.toml. Unknown keys and values of another type are errors: "1" is not converted to 1."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )
