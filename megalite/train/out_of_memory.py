"""The message of a rank whose accelerator has no memory left: when, what it keeps there, and what is saved."""

import math

from megalite.config.sections.schema import RunConfig
from megalite.launcher.control.progress import progress
from megalite.monitor.memory import ExhaustedCard
from megalite.planner.out_of_memory import out_of_memory_lines
from megalite.train.interruption import what_is_left


class KnownRun:
    """The settings of a run, as far as they are known. config: at first without its precision. stage: of this rank."""

    def __init__(self, config: RunConfig, stage: int):
        self._config, self._stage = config, stage
        # Rows of the vocabulary; None until the settings are resolved.
        self._vocab_size: int | None = None

    def resolved(self, config: RunConfig, vocab_size: int) -> None:
        """Note the settings with their precision, and the number of rows of the vocabulary."""
        self._config, self._vocab_size = config, vocab_size

    def lines(self, card: ExhaustedCard | None) -> list[str]:
        """Return the lines for `exhausted_memory_explained`."""
        when = "before the first step" if progress.step is None else f"after step {progress.step}"
        kinds = []
        if self._vocab_size is not None and (card is None or card.full):
            total = math.inf if card is None else card.total
            kinds = out_of_memory_lines(self._config, self._vocab_size, self._stage, total)
        return [f"{when}: {progress.activity}", *kinds, what_is_left(self._config)]
