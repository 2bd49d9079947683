"""The runs of a study: their settings, checked all together, and their common text, tokenized once."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.config.first_run import Starter
from megalite.config.flags import COMMAND_LINE
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.data.ensure import ensure_data
from megalite.data.files.token_file import TokenFile
from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.errors import ConfigError, Problem
from megalite.launcher.process import available_cores

# Settings that do not change what a run computes.
_BESIDE = ("run.folder", "training.threads", "monitor", "launch", "checkpoint")


@dataclass(frozen=True)
class StudySource:
    """The settings as the user wrote them: RUN.toml and flags, or flags that name a text and its starter."""

    run_file: Path | None
    flags: tuple[str, ...]
    starter: Starter | None = None

    @property
    def name(self) -> str:
        return COMMAND_LINE if self.run_file is None else str(self.run_file)

    def config(self, *flags: str) -> RunConfig:
        """Return the resolved settings under further flags. Raises ConfigError with every problem."""
        return load_run(self.run_file, [*self.flags, *flags], places=True, starter=self.starter).config


@dataclass(frozen=True)
class StudyRun:
    """A run of a study.

    values: the settings that make it, as flags take them. settings_key: a hash of all that it computes with.
    """

    name: str
    folder: Path
    values: Mapping[str, str]
    flags: tuple[str, ...]
    config: RunConfig
    settings_key: str


@dataclass(frozen=True)
class StudyText:
    """The text that all runs share. flags: settings that name its token files, none where each run prepares its own.

    vocab_size, train_tokens: None where the runs do not share it.
    """

    flags: tuple[str, ...] = ()
    fingerprint: str = ""
    vocab_size: int | None = None
    train_tokens: int | None = None


def study_folder(config: RunConfig, kind: str) -> Path:
    """Return the folder of a study: run.folder with its kind behind it."""
    folder = Path(config.run.folder)
    return folder.with_name(f"{folder.name}-{kind}")


def checked_runs(
    source: StudySource, folder: Path, named: Mapping[str, Mapping[str, str]], *, jobs: int
) -> list[StudyRun]:
    """Return the runs, name -> values. Raises ConfigError with every problem of every run, each problem once.

    With several at once each has its share of the cores, unless training.threads says a number.
    """
    runs, where = [], dict[Problem, list[str]]()
    for name, values in named.items():
        flags = [f"--{key}={value}" for key, value in values.items()]
        flags.append(f"--run.folder={folder / name}")
        try:
            config = source.config(*flags)
        except ConfigError as error:
            for problem in error.problems:
                where.setdefault(problem, []).append(name)
            continue
        if jobs > 1 and config.training.threads == "auto":
            threads = max(1, available_cores() // (jobs * config.layout.world_size))
            flags.append(f"--training.threads={threads}")
        runs.append(
            StudyRun(name, folder / name, values, (*source.flags, *flags), config, _settings_key(config))
        )
    if where:
        problems = [
            problem if len(names) == len(named) else replace(problem, key=f"{names[0]}: {problem.key}")
            for problem, names in where.items()
        ]
        raise ConfigError(problems, source.name)
    return runs


def share_text(config: RunConfig, folder: Path, swept: Sequence[str]) -> StudyText:
    """Tokenize the text of all runs once, into `folder`; nothing where they do not have it in common.

    swept: the keys in which the runs differ. Raises DataError like a run.
    """
    data = config.data
    apart = any(key.split(".")[0] in ("data", "tokenizer") for key in swept)
    if apart or data.kind != "text" or data.streaming or data.blend or data.order != "megalite":
        return StudyText()
    folder.mkdir(parents=True, exist_ok=True)
    ready = ensure_data(config, folder)
    tokens = sum(len(TokenFile.open(prefix).tokens) for prefix in ready.train)
    fingerprint = hashlib.sha256(json.dumps(sorted(ready.fingerprints.items())).encode()).hexdigest()
    rows = None if config.model.vocab_size == "auto" else config.model.vocab_size
    if ready.tokenizer is not None:
        rows = load_tokenizer(ready.tokenizer).vocab_size
    flags: list[str] = []
    prepared = not ready.train[0].resolve().is_relative_to(folder.resolve())
    if not prepared and ready.tokenizer is not None:
        flags = [
            f"--data.source={ready.train[0]}",
            "--data.split=unset",
            f"--tokenizer.path={ready.tokenizer}",
        ]
        flags += ["--tokenizer.vocab_size=unset", "--tokenizer.kind=unset", "--data.min_length=unset"]
        flags += [f"--data.validation={prefix}" for prefix in ready.validation]
    return StudyText(tuple(flags), fingerprint, rows, tokens)


def with_text(runs: Sequence[StudyRun], text: StudyText) -> list[StudyRun]:
    """Return the runs with the shared token files as their text."""
    return [
        replace(
            run,
            flags=(*run.flags, *text.flags),
            settings_key=hashlib.sha256(f"{run.settings_key}{text.fingerprint}".encode()).hexdigest()[:16],
        )
        for run in runs
    ]


def _settings_key(config: RunConfig) -> str:
    settings = config.model_dump(mode="json")
    for key in _BESIDE:
        section, _, name = key.partition(".")
        if name:
            settings[section].pop(name)
        else:
            settings.pop(section)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
