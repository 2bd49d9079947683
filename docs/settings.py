"""The page of all settings, from the schema.

python -m docs.settings        # writes docs/configuration.md
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from megalite.config.sections.describe import section_models, type_names
from megalite.config.sections.schema import ParameterGroupConfig
from megalite.config.sections.section import Section
from megalite.config.sections.text_sections import BlendPart, CurriculumPart
from megalite.config.sections.toml import format_value

PAGE = Path(__file__).parent / "configuration.md"
PREAMBLE = """# Configuration

Written by `python -m docs.settings` from the schema; a test keeps it so.

A run file is TOML: `[section]` and `key = value`. A `.yaml`, `.yml` or `.json` file has the same sections and keys, and
`null` where a setting has no default. Numbers are those of YAML 1.2: `1e-4` is one, `1:30` is text. Every setting is
also a flag, which takes precedence:

```bash
megalite train run.toml --training.steps 500 --data.source '["book.txt", "other.txt"]'
megalite config show run.toml
```

The second command prints every value of a run with its origin, and DeepSpeed's JSON. `megalite train --help training`
shows a section in the terminal.

`--section.key unset` leaves a setting at its default, whatever the run file, DeepSpeed's JSON, the preset or the
`config.json` says; so does `None` in Python's `load_config`. `none` is a value of the settings that list it, and of no
other. A text that is spelled so is quoted: `--run.folder '"unset"'`.

Order of precedence: a flag, the run file, DeepSpeed's JSON, `model.preset` or a `config.json`, the default.
"""


def page() -> str:
    """Return the page, in Markdown."""
    lines = [PREAMBLE]
    for name, model in section_models().items():
        lines += _section(f"[{name}]", model)
        if name == "optimizer":
            lines += _section("[[optimizer.groups]]", ParameterGroupConfig)
        if name == "data":
            lines += _section("[[data.blend]]", BlendPart)
            lines += _section("[[data.curriculum]]", CurriculumPart)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(name: str, model: type[Section]) -> Iterator[str]:
    first = (model.__doc__ or "").strip().splitlines()[0]
    yield from (f"## {name}", "", first, "")
    yield from ("| key | takes | default | meaning |", "|---|---|---|---|")
    for key, info in model.model_fields.items():
        cells = (
            f"`{key}`",
            _cell(", ".join(type_names(info.annotation))),
            _default(info),
            _cell(info.description or ""),
        )
        yield f"| {' | '.join(cells)} |"
    if name == "[deepspeed]":
        yield "| any key of DeepSpeed's JSON | | | as in DeepSpeed, for example `[deepspeed.zero_optimization]` |"
    yield ""


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    return "" if info.default is None else f"`{_cell(format_value(info.default))}`"


def _cell(text: str) -> str:
    return text.replace("true | false", "true or false").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
