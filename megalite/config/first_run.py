"""Settings of a first run: a model of some size, fitted to the length of its text and to this machine's cores."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.sections.hub_dataset import HubDataset
from megalite.config.sections.unchecked import SettingsDraft

STARTER = "fitted to the text"

# The tokens per second and core of the size `tiny` on a server's processor, and how long its run may take.
_TOKENS_PER_CORE_SECOND, _SECONDS = 8_000, 300
_LEAST_STEPS, _EPOCHS = 200, 10
# Among fewer documents a share of 5 % may be none.
_SPLIT_DOCUMENTS = 100
# Settings of the starter -> settings that make them unnecessary or contradict them.
_INSTEAD = {
    "model.preset": ("model.hf_config", "model.weights"),
    "tokenizer.vocab_size": ("tokenizer.path", "model.weights"),
    "training.steps": ("training.epochs",),
    "training.epochs": ("training.steps",),
    "training.micro_batch_size": ("training.micro_batches", "training.global_batch_size"),
    "training.micro_batches": ("training.micro_batch_size", "training.global_batch_size"),
    "data.split": ("data.validation",),
    "optimizer.warmup_steps": ("optimizer.warmup_ratio",),
}


@dataclass(frozen=True)
class Size:
    """A size of model with the settings that suit it.

    sequence_length: at most, since a short text has shorter sequences. tensor: the largest tensor-parallel size.
    settings: others, as section.key -> value.
    """

    preset: str
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    learning_rate: float
    tensor: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


_ON_CARDS = {"training.precision": "bf16", "model.chunked_loss": 2048}
# The vocabularies of these presets are those of other tokenizers.
_LARGE = {**_ON_CARDS, "model.vocab_size": "auto", "training.recompute": "selective"}
SIZES = {
    "tiny": Size("tiny", 256, 4, 4, 3e-3),
    # Learning rates of Brown et al. 2020, table 2.1; 8 ranks have its batch of half a million tokens.
    "125m": Size("medium", 1024, 16, 4, 6e-4, settings=_ON_CARDS),
    "350m": Size("large", 2048, 8, 4, 3e-4, settings=_ON_CARDS),
    "760m": Size("xlarge", 2048, 4, 8, 2.5e-4, settings={**_ON_CARDS, "training.recompute": "selective"}),
    "1b": Size("tinyllama-1.1b", 2048, 4, 16, 4e-4, settings=_LARGE),
    "8b": Size("llama-3-8b", 4096, 1, 64, 3e-4, tensor=4, settings=_LARGE),
}


@dataclass(frozen=True)
class Starter:
    """The facts that the settings of a first run follow from.

    source: the first text, whose name the run folder gets. characters: of the whole text. words: distinct ones, None
    for a prepared pair, which has a tokenizer. documents: in the first megabytes. cores: that one process may use.
    """

    source: str
    characters: int
    words: int | None
    documents: int
    cores: int
    size: Size = SIZES["tiny"]
    kind: str = "text"
    """data.kind."""

    def name_model(self, draft: SettingsDraft) -> None:
        """Set the preset, before presets are read."""
        self._fill(draft, {"model.preset": self.size.preset})

    def fill(self, draft: SettingsDraft) -> None:
        """Set every other setting that the draft has not."""
        length = _whole(draft, "training", "sequence_length") or self.sequence_length
        small = self.size is SIZES["tiny"]
        settings = {
            "run.folder": f"runs/{self._name or 'text'}",
            "tokenizer.vocab_size": self.vocab_size,
            "training.sequence_length": length,
            "training.micro_batch_size": self.size.micro_batch_size,
            "training.micro_batches": self.size.micro_batches,
            "training.steps": self.steps(length) if small else None,
            "training.epochs": None if small else 1.0,
            "optimizer.learning_rate": self.size.learning_rate,
            "data.split": [0.95, 0.05] if self._can_be_split else None,
        }
        self._fill(draft, {**settings, **self.size.settings})
        steps = _whole(draft, "training", "steps")
        if steps is None:
            # The data says later how many steps the epochs have: at most this many.
            most = self.tokens // (length * self.size.micro_batch_size * self.size.micro_batches)
            every = {"monitor.every": 10, "validation.every": 250, "checkpoint.every": 500}
            every["optimizer.warmup_steps"] = min(700, most // 100)
        else:
            shares = {"monitor.every": 30, "validation.every": 5, "checkpoint.every": 2}
            every = {name: -(-steps // share) for name, share in shares.items()}
            every["optimizer.warmup_steps"] = min(50, steps // 10)
        if draft.has("data", "validation") or draft.has("data", "split"):
            every["validation.samples"] = 64
        else:
            del every["validation.every"]
        self._fill(draft, {**every, "checkpoint.keep_last": 2})

    @property
    def _can_be_split(self) -> bool:
        """Whether 5 % of the text is some of it: a single document is divided by tokens, several as whole ones."""
        return (self.documents == 1 and self.kind == "text") or self.documents >= _SPLIT_DOCUMENTS

    @property
    def tokens(self) -> int:
        """The length of the text in tokens, about: a small vocabulary has three characters a token."""
        return self.characters // 3

    @property
    def vocab_size(self) -> int | None:
        """A vocabulary that the text certainly supports, and whose ids it has often enough to learn them."""
        if self.words is None:
            return None
        often = min(8192, max(512, _power_of_two(self.characters // 128)))
        return min(often, 257 + self.words * 9 // 10)

    @property
    def sequence_length(self) -> int:
        """The longest power of two, from 16 to that of the size, of which the text has a hundred sequences.

        Conversations are not cut: theirs is that of the size.
        """
        if self.kind != "text":
            return self.size.sequence_length
        return min(self.size.sequence_length, max(16, _power_of_two(self.tokens // 100)))

    def steps(self, sequence_length: int) -> int:
        """Return the steps of ten epochs, but no more than take minutes, and no fewer than 200."""
        tokens = min(_EPOCHS * self.tokens, self.cores * _TOKENS_PER_CORE_SECOND * _SECONDS)
        sequences = self.size.micro_batch_size * self.size.micro_batches
        return max(_LEAST_STEPS, round(tokens / (sequence_length * sequences * 10)) * 10)

    @property
    def _name(self) -> str:
        """The name of the first text, without the parts that a folder is not named after."""
        data_set = HubDataset.of(self.source)
        path = Path(self.source).expanduser() if data_set is None else Path(data_set.repository)
        return path.name.split(".")[0]

    def _fill(self, draft: SettingsDraft, settings: Mapping[str, Any]) -> None:
        missing = {}
        for full, value in settings.items():
            section, key = full.split(".")
            others = (each.split(".") for each in _INSTEAD.get(full, ()))
            if (
                value is not None
                and draft.is_open(section, key)
                and not any(draft.has(*each) for each in others)
            ):
                missing[section, key] = value
        for (section, key), value in missing.items():
            draft.set(section, key, value, STARTER)


def _whole(draft: SettingsDraft, section: str, key: str) -> int | None:
    """Return a setting of the draft if it is a positive whole number; other values are reported by the schema."""
    value = draft.section(section).get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to `number`; 0 for 0."""
    return 1 << number.bit_length() - 1 if number else 0
