"""megalite: a 3D-parallel runtime for training large language models.

from megalite import Trainer, generate, load, load_config

Trainer(load_config("run.toml", training={"steps": 100})).train()
print(generate(load("runs/quickstart"), "Once upon a time", tokens=40))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megalite.version import __version__ as __version__

if TYPE_CHECKING:
    from megalite.config.load import load_config as load_config
    from megalite.config.sections.schema import RunConfig as RunConfig
    from megalite.generation.loaded import load as load
    from megalite.generation.text import generate as generate
    from megalite.train.callbacks import ActiveRun as ActiveRun
    from megalite.train.callbacks import Callback as Callback
    from megalite.train.run import Trainer as Trainer

__all__ = ["ActiveRun", "Callback", "RunConfig", "Trainer", "generate", "load", "load_config"]

_HOMES = {
    "ActiveRun": "megalite.train.callbacks",
    "Callback": "megalite.train.callbacks",
    "RunConfig": "megalite.config.sections.schema",
    "Trainer": "megalite.train.run",
    "generate": "megalite.generation.text",
    "load": "megalite.generation.loaded",
    "load_config": "megalite.config.load",
}


def __getattr__(name: str) -> Any:
    # Imported when used: `import megalite` costs nothing.
    if name not in _HOMES:
        raise AttributeError(f"module megalite has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
