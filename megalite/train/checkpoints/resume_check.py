"""Compares a run with the checkpoint that it goes on from: its settings, the places of its samples, and its data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import read_manifest
from megalite.checkpoint.manifest import Manifest
from megalite.config.output.dotted_keys import flat
from megalite.config.sections.schema import RunConfig, RunSection
from megalite.data.batches.stream_files import StreamFile
from megalite.data.ensure import RunData
from megalite.errors import ConfigError, Problem, listed
from megalite.train.checkpoints.resume_table import Effect, Rule, effect_of

_WORDS = {"True": "true", "False": "false", "None": "unset", "[]": "unset"}
# train.checkpoints.reference_table compares these itself, once they are known.
REFERENCE = "reference.json"


@dataclass(frozen=True)
class ChangedSetting:
    """A setting with its text in the checkpoint and its text now, and what the change does."""

    key: str
    before: str
    now: str
    effect: Effect

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def changed_settings(written: Mapping[str, Any], config: RunConfig) -> list[ChangedSetting]:
    """Return the settings that are not those of a checkpoint's manifest, by name, but for those that change no number.

    Settings that the checkpoint's version of megalite did not know have no part.
    """
    tables = config.model_dump(mode="json")
    before, now = (_texts(table) for table in (written, tables))
    keys = sorted(key for key in now.keys() | before.keys() if _in_both(key, written, tables))
    changed = [
        ChangedSetting(key, was, is_now, effect_of(key))
        for key in keys
        if (was := before.get(key, "unset")) != (is_now := now.get(key, "unset"))
    ]
    streams = bool((written.get("data") or {}).get("streaming")) and config.data.streaming
    special = {_LENGTH: _LENGTH_OF_STREAM} if streams else {}
    if config.data.order == "megatron":
        special = dict.fromkeys(_OF_MEGATRONS_ORDER, _OTHER_ORDER)
    return [
        replace(setting, effect=special.get(setting.key, setting.effect))
        for setting in changed
        # "auto" takes the precision of the checkpoint.
        if setting.effect.rule != Rule.FREE and (setting.key, setting.now) != ("training.precision", "auto")
    ]


_OF_MEGATRONS_ORDER = ("run.seed", "training.steps", "training.global_batch_size", "data.split")
_OTHER_ORDER = Effect(Rule.REFUSED, "Megatron's order of the samples depends on it (data.order)")
_LENGTH = "training.sequence_length"
_LENGTH_OF_STREAM = Effect(Rule.SAID, "the text goes on behind what was read, in sequences of this length")


def change_notes(written: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield a line for each effect that changed settings have, with these settings."""
    by_text: dict[str, list[str]] = {}
    for change in changed_settings(written, config):
        if change.effect.text:
            by_text.setdefault(change.effect.text, []).append(str(change))
    for text, changes in by_text.items():
        yield f"settings that differ from the checkpoint's: {listed(changes, len(changes))}: {text}"


def _texts(tables: Mapping[str, Any]) -> dict[str, str]:
    return {key: _WORDS.get(text, text) for key, text in flat(tables)}


def _in_both(key: str, *tables: Mapping[str, Any]) -> bool:
    """Whether both runs know a setting; the keys of DeepSpeed are known with their section."""
    section, _, name = key.partition(".")
    setting = name.split(".")[0].split("[")[0]
    return all(
        section in table and (section == "deepspeed" or setting in (table[section] or {})) for table in tables
    )


class ResumeCheck:
    """A run and the checkpoint that it goes on from. Raises CheckpointError for a damaged manifest."""

    def __init__(self, checkpoint: Path, config: RunConfig):
        self.checkpoint, self.config = checkpoint, config
        self._manifest: Manifest = read_manifest(checkpoint)
        self._changed = changed_settings(self._manifest.config, config)

    @property
    def text_settings(self) -> str:
        """The changed settings that may make other tokens, with both values; "" without one."""
        return ", ".join(str(each) for each in self._changed if each.effect.rule == Rule.CONTENT)

    def require_same_run(self) -> None:
        """Refuse to join two runs that have nothing in common but the default folder.

        Raises ConfigError if run.folder was left at its default and the run there has other settings.
        """
        default, same = RunSection.model_fields["folder"].default, (Rule.NOTED, Rule.CONTENT, Rule.PLACES)
        if self.config.checkpoint.resume != "auto" or self.config.run.folder != default:
            return
        changed = [str(each) for each in self._changed if each.effect.rule not in same]
        if changed and not self.config.checkpoint.resume_changed:
            remedy = f"go on from there with --checkpoint.resume {self.checkpoint}"
            problem = Problem.reset(
                "run.folder",
                f"{default} holds a run with other settings ({listed(changed)})",
                f"start a new run with --run.folder runs/second, or {remedy}",
                "runs/second",
            )
            raise ConfigError([problem])

    def require_same_samples(self) -> None:
        """Refuse to go on where the position in the data has no meaning with the settings of this run.

        Raises ConfigError, unless no sample was seen or checkpoint.resume_changed is set.
        """
        problems = [
            self._problem(
                setting.key,
                setting.now,
                f"{setting.before}, that of {self.checkpoint}",
                setting.effect.text,
                setting.before,
            )
            for setting in self._changed
            if setting.effect.rule == Rule.REFUSED
        ]
        self._raise([*problems, *self._places()])

    def require_same_data(self, data: RunData) -> list[str]:
        """Refuse to go on with other tokens or streamed files; return notes, of what differs and may.

        Raises ConfigError, unless no sample was seen or checkpoint.resume_changed is set.
        """
        recorded, settings = self._manifest.data, self.text_settings
        notes, problems = [], list(self._streams(data.stream))
        why = settings or "the settings are the same: the files were written anew"
        if not recorded and settings and not problems:
            notes.append(f"{self.checkpoint} has no fingerprint of its data to compare: {settings}")
        names = recorded.keys() | data.fingerprints.keys() if recorded else set()
        for name in sorted(names - {REFERENCE, *(problem.key for problem in problems)}):
            if recorded.get(name) == data.fingerprints.get(name):
                continue
            if name == "tokenizer.path" and not (recorded.get(name) and data.fingerprints.get(name)):
                continue  # token files without a tokenizer, which may be named later
            if name == "data.validation":
                notes.append(f"{name}: from here on its losses are of other text than before ({why})")
                continue
            what, follows = ("text", "so samples would be repeated or left out")
            if name == "tokenizer.path":
                what, follows = ("ids", "and the weights are of those ids")
            message = f"not the {what} of the steps before {self.checkpoint} ({why}), {follows}"
            problems.append(Problem(name, message, "name the same one, or use a new run.folder"))
        self._raise(problems)
        return [*notes, *(f"{problem.key}: {problem.message}" for problem in problems if self._seen)]

    @property
    def _seen(self) -> bool:
        """Whether a sample was seen: a checkpoint that was imported has none."""
        return self._manifest.step > 0

    def _raise(self, problems: Sequence[Problem]) -> None:
        if problems and self._seen and not self.config.checkpoint.resume_changed:
            remedy = "or set checkpoint.resume_changed = true to go on with it"
            cure = {"checkpoint.resume_changed": True}
            raise ConfigError(
                [replace(each, remedy=f"{each.remedy}, {remedy}", set=cure) for each in problems]
            )

    def _problem(self, key: str, now: object, other: str, why: str, same: object) -> Problem:
        return Problem(key, f"{now} is not {other}, and {why}", f"use {same}, or a new run.folder")

    def _places(self) -> Iterator[Problem]:
        """Yield what moves the samples of blended sets and length buckets, which count steps of one size."""
        before, now = self._manifest.config.get("data") or {}, self.config.model_dump(mode="json")["data"]
        step, samples = self._manifest.step, self._manifest.trainer_state.get("samples", 0)
        size = self.config.batch.global_batch_size
        counted = [name for name in ("curriculum", "length_buckets") if before.get(name) or now[name]]
        if counted and samples != step * size:
            yield Problem(
                "training.global_batch_size",
                f"{size} is not the size of the {step} steps before {self.checkpoint}, which had {samples} sequences, "
                f"and data.{counted[0]} counts steps of one size",
                f"use {samples // step}" if step and samples % step == 0 else f"delete data.{counted[0]}",
            )
        same_sets = len(before.get("blend") or ()) == len(now["blend"] or ())
        if same_sets and _weights_up_to(step, before) != _weights_up_to(step, now):
            yield Problem(
                "data.curriculum" if counted else "data.blend",
                f"the weights up to step {step} are not those of {self.checkpoint}, so samples would be repeated or "
                "left out",
                f"change the weights with a [[data.curriculum]] table of step {step + 1} or later",
            )

    def _streams(self, files: Sequence[StreamFile]) -> Iterator[Problem]:
        """Yield what moves the places in streamed files."""
        position, size = self._manifest.stream, self.config.batch.global_batch_size
        if position is None or not files:
            return
        if size != len(position.lanes):
            why = "each sequence of it streams a part of its own"
            lanes = len(position.lanes)
            yield self._problem("training.global_batch_size", size, f"that of {self.checkpoint}", why, lanes)
        now = tuple((file.path.name, file.size_bytes) for file in files)
        moved = [size for _, size in now] != [size for _, size in position.files]
        if moved or (not self._manifest.data and now != position.files):
            yield Problem(
                "data.source",
                f"{_first_difference(position.files, now)}, and the places where {self.checkpoint} goes on depend on "
                "the files",
                "name the same files, or use a new run.folder",
            )


def _first_difference(before: Sequence[tuple[str, int]], now: Sequence[tuple[str, int]]) -> str:
    """Say how two lists of files, each its name and size in bytes, differ."""
    if len(before) != len(now):
        return f"{len(now)} files are not the {len(before)} of the steps before"
    (name, was), (other, size) = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
    if name != other:
        return f"{other} is in the place of {name}"
    return f"{name} has {size:,} bytes, not {was:,}"


def _weights_up_to(step: int, data: Mapping[str, Any]) -> list[tuple[int, list[float]]]:
    """Return (first step, weights of the data sets) of each change that the first `step` steps have."""
    first = [float(part["weight"]) for part in data.get("blend") or ()]
    later = [(part["step"], list(map(float, part["weights"]))) for part in data.get("curriculum") or ()]
    return [(1, first), *(change for change in later if change[0] <= step)]
