"""Read a run file in the form that its suffix names: TOML, YAML or JSON."""

from pathlib import Path
from typing import Any

from megalite.config.sections.toml import read_text, read_toml

MAPPINGS = (".yaml", ".yml", ".json")
"""The suffixes of YAML and JSON; a file of another suffix is TOML."""


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the sections of a run file; those without a key count as absent. Raises ConfigError."""
    if path.suffix.lower() not in MAPPINGS:
        return read_toml(path)
    # Costs milliseconds to import, which a run file in TOML does not pay.
    from megalite.config.sections.mapping_file import read_mapping

    table = read_mapping(path, read_text(path), str(path))
    return {section: values for section, values in table.items() if values is not None}
