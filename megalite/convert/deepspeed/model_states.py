"""A *_model_states.pt file of DeepSpeed's engine: low-precision weights, frozen parameters, and counters of the run.

The keys are those of `_common_checkpoint_state` in DeepSpeed's runtime/engine.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.convert.deepspeed.partitions import ParamShapes, param_shapes
from megalite.convert.deepspeed.rank_states import whole_number
from megalite.convert.foreign.unpickle import load_pickle
from megalite.errors import CheckpointError


@dataclass(frozen=True)
class ModelStates:
    """The file of one data-parallel rank. table: its content; tensors stay on disk until they are used."""

    path: Path
    table: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> "ModelStates":
        """Raises CheckpointError for a file that is damaged, or of another kind."""
        content = load_pickle(path)
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path} holds no dict, so it is no model_states of DeepSpeed's engine")
        return cls(path, content)

    def require_module(self) -> None:
        """Raise CheckpointError for a file without weights, such as the pipeline engine writes."""
        if not isinstance(self.table.get("module"), Mapping):
            raise CheckpointError(
                f"{self.path} lacks module, the weights that DeepSpeed's engine saves; save the checkpoint again"
            )

    @cached_property
    def module(self) -> dict[str, Tensor]:
        """The weights by name, without buffers and without tensors that ZeRO 3 has partitioned."""
        buffers = self.table.get("buffer_names")
        buffers = set(buffers) if isinstance(buffers, list) else set()
        return {
            name: values
            for name, values in self.table["module"].items()
            if isinstance(values, Tensor)
            and values.is_floating_point()
            and values.numel()
            and name not in buffers
        }

    @cached_property
    def shapes(self) -> ParamShapes | None:
        return param_shapes(self.table, self.path)

    @cached_property
    def shared(self) -> Mapping[str, str]:
        """Name of a tied parameter -> the name under which its values are stored."""
        return self._mapping("shared_params")

    @cached_property
    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters that the optimizer does not have, as ZeRO 2 and 3 save them."""
        groups = param_shapes({"param_shapes": self.table.get("frozen_param_shapes")}, self.path) or [{}]
        return dict(groups[0])

    @cached_property
    def frozen_fragments(self) -> Mapping[str, Any]:
        """The frozen parameters' values, with ZeRO 3 this rank's share of them."""
        return self._mapping("frozen_param_fragments")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The run's DeepSpeed JSON."""
        return self._mapping("ds_config")

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the first of the counters that is there, such as global_steps; `default` without any.

        Raises CheckpointError for a counter that is no number, and without a default for a missing one.
        """
        name = next((name for name in names if self.table.get(name) is not None), names[0])
        value = self.table.get(name)
        number = default if value is None else whole_number(value)
        if number is None or not 0 <= number < 2**53:
            said = (
                f" has no number in {name}" if value is None else f": {name} is {value!r}, which is no count"
            )
            raise CheckpointError(f"{self.path}{said}; save the checkpoint again")
        return number

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self.table.get(key)
        return value if isinstance(value, Mapping) else {}
