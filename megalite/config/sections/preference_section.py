"""The settings of [preference]."""

from typing import Annotated, Literal

from pydantic import Field

from megalite.config.sections.section import Section


class PreferenceConfig(Section):
    """The loss of pairs of answers, with data.kind = "preference" (direct preference optimization)."""

    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid", description='"sigmoid": DPO; "ipo": squared difference from 1 / (2 beta), by token'
    )
    beta: float = Field(0.1, gt=0, description="strength with which the model stays close to the reference")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="sigmoid: probability that a pair's labels are swapped (conservative DPO)"
    )
