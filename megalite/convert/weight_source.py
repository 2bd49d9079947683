"""Where weights are, and in whose files. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalite.topology.shape import ModelShape


@dataclass(frozen=True)
class WeightSource:
    """Weights on disk, as `open_weights` opens them (`convert/weights.py`).

    format: of the files in `folder`: a checkpoint, a Hugging Face folder, or an adapter that PEFT has saved. shape: of
    the model, with its adapter. base: the Hugging Face folder of the frozen weights, if `folder` holds an adapter and
    its model is to be read; None: `folder` is read alone. int8: whether `folder` has int8 linears.
    """

    folder: Path
    format: Literal["checkpoint", "huggingface", "peft"]
    shape: ModelShape
    base: Path | None = None
    int8: bool = False

    @property
    def read_shape(self) -> ModelShape:
        """The shape of the model that is read: low ranks are merged into their base."""
        return self.shape if self.base is None or self.shape.prefix_tokens else self.shape.base
