"""The model of `megalite plan`: its settings to start from, and the run file of the layout that was found."""

import argparse
from pathlib import Path
from typing import Any

from megalite.cli.arguments import closest
from megalite.config.load import load_run
from megalite.config.output.summary import TOKENS_PER_PARAMETER
from megalite.config.sections.derived import vocabulary
from megalite.config.sections.run_file import read_run_file
from megalite.config.sections.schema import RunConfig
from megalite.config.sections.toml import format_table
from megalite.config.sources.presets import PRESETS
from megalite.errors import ConfigError, Problem
from megalite.planner.mixture_config import MixtureRun, read_mixture
from megalite.planner.parameter_count import ParameterCount
from megalite.planner.search import PlannedLayout
from megalite.topology.experts import MixtureShape

PLANNED_ROWS = 32_000
"""Rows of the vocabulary of a model that names none."""
_LENGTH = 4096
_TOKENS_A_STEP = 2**22
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_REPLACED = {
    "parallel": (
        "schedule",
        "virtual_stages",
        "layers_per_stage",
        "context",
        "context_method",
        "expert",
        "expert_tensor",
    ),
    "training": ("micro_batches", "recompute_layers", "recompute_ratio"),
    "deepspeed": ("zero_optimization",),
}


class PlanBase:
    """The settings to start from. file: RUN.toml, or None. tables: those that a written run file begins with.

    mixture: the shape of a mixture, whose dense sizes stand in the tables; None: no mixture.
    """

    def __init__(
        self, file: Path | None, tables: dict[str, dict[str, Any]], mixture: MixtureShape | None = None
    ):
        self.file, self.tables, self.mixture = file, tables, mixture

    def load(self) -> RunConfig:
        """Return the resolved run."""
        config = load_run(self.file, self.flags).config
        return config if self.mixture is None else MixtureRun.of(config, self.mixture)

    @property
    def flags(self) -> list[str]:
        if self.file is not None:
            settings: dict[str, Any] = {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.data": 1}
            settings |= {
                "parallel.context": 1,
                "parallel.expert": 1,
                "parallel.expert_tensor": "unset",
                "parallel.schedule": "1f1b",
                "parallel.virtual_stages": "auto",
            }
            settings |= {"parallel.layers_per_stage": "unset", "parallel.sequence": "false"}
        else:
            settings = {
                f"{section}.{key}": value
                for section, table in self.tables.items()
                for key, value in table.items()
            }
        return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def base_flags(options: argparse.Namespace) -> PlanBase:
    """Return the settings of MODEL: a preset, a run file, a config.json or its folder."""
    path, mixture = Path(options.model).expanduser(), None
    # A .json is a config.json here.
    if path.suffix in (".toml", ".yaml", ".yml"):
        for name, key in (
            ("sequence_length", "training.sequence_length"),
            ("batch", "training.global_batch_size"),
        ):
            if getattr(options, name) is not None:
                message = f"has no effect with a run file, which is planned with its own {key}"
                raise ConfigError([Problem(f"--{name.replace('_', '-')}", message, f"set {key} in {path}")])
        return PlanBase(path, read_run_file(path))
    if options.model in PRESETS:
        model: dict[str, Any] = {"preset": options.model}
        longest = PRESETS[options.model].get("max_position_embeddings", _LENGTH)
    elif (own := path / "run.toml").is_file() and not (path / "config.json").is_file():
        remedy = f"name its run file, {own}"
        raise ConfigError(
            [Problem("MODEL", f"{path} is a folder", remedy, {"MODEL": str(own)}, value=options.model)]
        )
    elif path.exists():
        mixture = read_mixture(path)
        model = {"hf_config": str(path)} if mixture is None else _dense_sizes(mixture)
        longest = _LENGTH
    else:
        message = f'"{options.model}" is no preset, no RUN.toml, no config.json and no folder'
        close = closest(options.model, PRESETS)
        cure = {"MODEL": close} if close else {}
        remedy = "megalite config presets lists the presets"
        raise ConfigError([Problem("MODEL", message, remedy, cure, value=options.model)])
    length = options.sequence_length or min(longest, _LENGTH)
    batch = options.batch or max(1, _TOKENS_A_STEP // length)
    training = {"steps": 1, "sequence_length": length, "micro_batch_size": 1, "global_batch_size": batch}
    tables: dict[str, dict[str, Any]] = {"model": model, "training": training, "data": {"source": "text/"}}
    if mixture is not None:
        tables["checkpoint"] = {"export": "false"}  # no family has these sizes alone
    config = PlanBase(None, tables, mixture).load()
    if vocabulary(config) is None:
        tables["tokenizer"] = {"vocab_size": PLANNED_ROWS}
    parameters = ParameterCount.of(config.shape(vocabulary(config) or PLANNED_ROWS)).total
    tokens = options.tokens or TOKENS_PER_PARAMETER * parameters
    training["steps"] = max(1, round(tokens / (batch * length)))
    return PlanBase(None, tables, mixture)


def _dense_sizes(mixture: MixtureShape) -> dict[str, Any]:
    """Return the settings of [model] that the rules of a layout read."""
    sizes = {name: getattr(mixture, name) for name in _SIZES}
    if mixture.experts is not None:
        sizes |= {name: getattr(mixture.experts, name) for name in _EXPERT_SIZES}
    return sizes | {"tie_word_embeddings": str(mixture.tie_word_embeddings).lower()}


def run_file(base: PlanBase, best: PlannedLayout, config: RunConfig) -> str:
    """Return the run file of a layout, with the settings that it was planned from."""
    tables = {name: dict(table) for name, table in base.tables.items()}
    # The layout's own are all that was planned with.
    for section, keys in _REPLACED.items():
        for key in keys:
            tables.get(section, {}).pop(key, None)
    for key, value in best.choice.flags.items():
        section, _, name = key.partition(".")
        if section == "deepspeed":
            tables.setdefault(section, {})["zero_optimization"] = {"stage": value}
        else:
            tables.setdefault(section, {})[name] = value
    training = tables["training"]
    training["global_batch_size"] = config.batch.global_batch_size
    lines = ["# written by megalite plan; set data.source to your text"]
    for name, table in tables.items():
        lines += format_table(name, table)
    return "\n".join(lines) + "\n"
