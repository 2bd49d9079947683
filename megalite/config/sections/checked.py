"""The values of a run's sections that passed the schema, as the rules over several settings read them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.sections.adapter_section import AdapterConfig
from megalite.config.sections.monitor_section import MonitorConfig
from megalite.config.sections.preference_section import PreferenceConfig
from megalite.config.sections.schema import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunSection,
)
from megalite.config.sections.text_sections import DataConfig, TokenizerConfig, ValidationConfig
from megalite.config.sections.training_section import TrainingConfig
from megalite.launcher.rank.detect import RankInfo


class Unknown(Exception):
    """A rule reads a setting that is wrong or missing. The schema check has reported it, so the rule is skipped."""


class KnownValues:
    """A section with only its valid values; reading any other one raises Unknown."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise Unknown(name) from None


@dataclass(frozen=True)
class CheckedRun:
    """The valid settings of a run, for rules over several of them. Reading an invalid one raises Unknown."""

    run: RunSection
    model: ModelConfig
    adapter: AdapterConfig
    parallel: ParallelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    preference: PreferenceConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    monitor: MonitorConfig
    deepspeed: Mapping[str, Any]
    """native_optimizer and the keys passed on to DeepSpeed; empty without [deepspeed]."""
    world_size: int | None
    """Number of ranks that a launcher started; None: megalite starts its own."""
    origins: Mapping[str, str]
    incomplete: Collection[str]
    """Sections with a part that could not be read."""
    launched: RankInfo | None = None
    """The rank of a launcher that this process is, for messages about `world_size`."""

    def source(self, key: str) -> str:
        """The origin of `section.key` in parentheses, for a message: "(run.toml)"."""
        return f"({self.origins.get(key, 'default')})"

    @property
    def zero_stage(self) -> int:
        zero = self.deepspeed.get("zero_optimization", {})
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
        if isinstance(stage, bool) or not isinstance(stage, int):
            raise Unknown("deepspeed.zero_optimization.stage")
        return stage
