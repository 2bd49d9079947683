"""Load RUN.toml and flags into a resolved RunConfig, or raise one ConfigError with every problem."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config.deepspeed.read import apply_deepspeed
from megalite.config.first_run import Starter
from megalite.config.flags import COMMAND_LINE, apply_overrides, as_flags
from megalite.config.rules.batch import most_ranks, plan_batch
from megalite.config.rules.every import notes_of, problems_of
from megalite.config.rules.pipeline import chunks_per_stage, layers_per_chunk
from megalite.config.sections.checked import CheckedRun
from megalite.config.sections.derived import context_choice
from megalite.config.sections.run_file import read_run_file
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.shape_settings import model_shape
from megalite.config.sections.unchecked import DEFAULT, DERIVED, SettingsDraft
from megalite.config.sources.huggingface import apply_hf_config
from megalite.config.sources.peft import apply_peft
from megalite.config.sources.presets import apply_preset, require_shape
from megalite.config.validate import validate
from megalite.errors import ConfigError
from megalite.launcher.rank.detect import RankInfo, rank_info
from megalite.launcher.rank.local_rank import without_local_rank
from megalite.topology.optimizers import OPTIMIZERS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRun:
    """A resolved run, the origin of each `section.key` that is not a default, and notes for the user."""

    config: RunConfig
    origins: Mapping[str, str]
    notes: tuple[str, ...]

    def origin(self, key: str) -> str:
        """Where a value came from: a file, a flag, a preset, a key of DeepSpeed's JSON, "default" or "derived"."""
        return self.origins.get(key, DEFAULT)


def load_run(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    world_size: int | RankInfo | None = None,
    *,
    slots: int | None = None,
    places: bool = False,
    starter: Starter | None = None,
) -> LoadedRun:
    """Read RUN.toml, apply `["--section.key", "value", ...]`, check all settings and fill in the derived ones.

    world_size: number of ranks that a launcher started, or the rank of it that this process is, so that messages name
        the launcher; None: megalite starts as many as the layout has.
    slots: number of ranks that can be started; with parallel.data = "auto" the run takes as many of them as it can.
    places: whether the files and folders that the settings name must exist on this machine.
    starter: gives the settings of a first run that are not set.
    Five settings stay open: model.vocab_size (from the tokenizer), the steps of training.epochs (from the data),
    training.threads, training.precision and training.micro_batch_size (from the machine).
    Raises ConfigError with every problem, those of the
    schema and those of the rules over several settings.
    """
    draft = SettingsDraft(COMMAND_LINE if path is None else str(path))
    if path is not None:
        _read_file(draft, Path(path))
    apply_overrides(draft, overrides)
    if starter is not None:
        starter.name_model(draft)
    apply_preset(draft)
    apply_hf_config(draft)
    require_shape(draft)
    apply_peft(draft)
    apply_deepspeed(draft, Path() if path is None else Path(path).parent)
    if starter is not None:
        starter.fill(draft)
    if isinstance(world_size, RankInfo):
        run = replace(validate(draft, world_size.world_size), launched=world_size)
    else:
        run = validate(draft, world_size)
    if slots is not None:
        run = replace(run, world_size=most_ranks(run, slots))
    problems = dict.fromkeys([*draft.problems, *problems_of(run, places=places)])
    if problems:
        problems_now = [replace(problem, value=draft.value(problem.key)) for problem in problems]
        raise ConfigError(problems_now, draft.source)
    resolved = _resolved(run)
    for key, value in resolved.items():
        section, name = key.split(".")
        if value != getattr(getattr(run, section), name):
            draft.set(section, name, value, DERIVED)
    return LoadedRun(RunConfig.model_validate(draft.values), draft.origins, (*draft.notes, *notes_of(run)))


def load_config(path: Path | str | None, *flags: str, **settings: Any) -> RunConfig:
    """Read RUN.toml and resolve it, for the number of ranks that a launcher started if there is one.

    settings: override the file, section by section: training={"steps": 100}, model={"preset": "small"}.
    flags: override both, as on the command line: "--training.steps", "100".
    Raises ConfigError with every problem.
    """
    info = rank_info()
    # Rank 0 prepares the text and writes the run folder; other machines may not have them.
    leads = info is None or info.rank == 0
    overrides = [*as_flags(settings), *without_local_rank(flags)]
    loaded = load_run(path, overrides, info, places=leads)
    if leads:
        for note in loaded.notes:
            logger.warning(note)
    return loaded.config


def _read_file(draft: SettingsDraft, path: Path) -> None:
    draft.values = read_run_file(path)
    for section, table in draft.values.items():
        for key in table if isinstance(table, dict) else ():
            draft.origins[f"{section}.{key}"] = draft.source


def _resolved(run: CheckedRun) -> dict[str, Any]:
    """Return `section.key` -> value of the settings that follow from the others; for a run without problems."""
    plan, model = plan_batch(run), run.model
    # The rank chooses it, by its memory.
    open_size = run.training.micro_batch_size == "auto" and run.training.micro_batches is None
    heads, optimizer = model.num_attention_heads, run.optimizer
    method, choice = run.parallel.context_method, context_choice(run)
    momentum = OPTIMIZERS[optimizer.name].momentum or 0.0
    return {
        "parallel.data": plan.data,
        "parallel.context_method": method if method != "auto" or choice is None else choice.method,
        "parallel.virtual_stages": chunks_per_stage(run),
        "parallel.layers_per_stage": layers_per_chunk(run),
        "training.micro_batch_size": "auto" if open_size else plan.micro_batch_size,
        "training.micro_batches": None if open_size else plan.micro_batches,
        "training.global_batch_size": plan.global_batch_size,
        "optimizer.momentum": momentum if optimizer.momentum is None else optimizer.momentum,
        "model.num_key_value_heads": model.num_key_value_heads or heads,
        "model.chunked_loss": model.chunked_loss or run.training.sequence_chunk,
        "model.head_dim": model_shape(model, 1).head_dim,
    }
