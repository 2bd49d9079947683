"""A run that goes on from the pretrained stories260K with conversations or pairs, on one thread."""

from pathlib import Path
from typing import Any

from megalite import load_config
from megalite.config.sections.schema import RunConfig

Sections = dict[str, dict[str, Any]]


def fine_tuning_run(
    shared_data: Path, source: Path, folder: Path, given: Sections, more: Sections
) -> RunConfig:
    """Return the run on the rows of `source`; `given`, then `more`, are merged into its settings."""
    settings: Sections = {
        "run": {"folder": folder},
        "model": {"weights": str(shared_data / "stories260K")},
        "training": {"precision": "fp32", "threads": 1},
        "optimizer": {"schedule": "constant", "weight_decay": 0.0, "gradient_clipping": 0.0},
        "tokenizer": {"end_of_document": "</s>", "chat_template": "plain"},
        "data": {"source": source},
    }
    for sections in (given, more):
        for name, values in sections.items():
            settings[name] = {**settings.get(name, {}), **values}
    return load_config(None, **settings)
