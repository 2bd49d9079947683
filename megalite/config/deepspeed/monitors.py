"""Read DeepSpeed's monitors, the blocks that say where metrics go, into [monitor]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.config.deepspeed.json_file import AUTO, Block
from megalite.config.deepspeed.values import problem_of
from megalite.config.sections.unchecked import SettingsDraft

_SINKS = {"csv_monitor": "csv", "tensorboard": "tensorboard", "wandb": "wandb"}
_OF_WANDB = {"group": "group", "project": "project", "team": "entity"}
_JOB_NAME = "DeepSpeedJobName"
"""DeepSpeed's default of job_name."""


def read_monitors(draft: SettingsDraft, block: Block) -> None:
    """Add each enabled block as a sink to monitor.report_to, with its names, unless a flag names the sinks."""
    for name, sink in _SINKS.items():
        table = block.values.get(name)
        if not isinstance(table, Mapping):
            continue  # `check_keys` reports it
        enabled = table.get("enabled", AUTO)
        if enabled != AUTO and (problem := problem_of("bool", enabled)):
            draft.problem(block.key(f"{name}.enabled"), *problem)
        if enabled is not True or _chosen_by_flag(draft):
            continue
        sinks = draft.section("monitor").get("report_to", [])
        if isinstance(sinks, list | tuple) and sink not in sinks:
            draft.set("monitor", "report_to", [*sinks, sink], block.origin(f"{name}.enabled"))
        if sink == "wandb":
            for theirs, ours in _OF_WANDB.items():
                block.take(draft, f"wandb.{theirs}", "monitor", ours, table.get(theirs))
        else:
            _read_folder(draft, block, name, table)


def _chosen_by_flag(draft: SettingsDraft) -> bool:
    return "monitor.report_to" in draft.unset or draft.given_by_flag("monitor.report_to")


def _read_folder(draft: SettingsDraft, block: Block, name: str, table: Mapping[str, Any]) -> None:
    """Set the folder of a sink to output_path/job_name, if the block has one of them."""
    parts = {key: table[key] for key in ("output_path", "job_name") if table.get(key, AUTO) not in ("", AUTO)}
    problems = {key: problem for key, value in parts.items() if (problem := problem_of("text", value))}
    for key, problem in problems.items():
        draft.problem(block.key(f"{name}.{key}"), *problem)
    if parts and not problems:
        folder = Path(parts.get("output_path", "")) / parts.get("job_name", _JOB_NAME)
        block.take(draft, f"{name}.{next(iter(parts))}", "monitor", f"{_SINKS[name]}_folder", str(folder))
