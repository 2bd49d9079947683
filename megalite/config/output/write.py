"""Write a resolved run as a run.toml."""

from pathlib import Path

from megalite.config.sections.schema import RunConfig
from megalite.config.sections.toml import format_table


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write a resolved run as RUN.toml; loading it with the same number of ranks gives an equal RunConfig."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("\n".join(_lines(config)) + "\n", encoding="utf-8")
    partial.replace(path)


def _lines(config: RunConfig) -> list[str]:
    lines: list[str] = []
    for name, section in config.model_dump().items():
        if section is None:
            continue
        if name == "training":
            # Left out, so that a flag can change one of the other two batch sizes alone.
            section.pop("micro_batches")
        lines += [*format_table(name, section), ""]
    return lines[:-1]
