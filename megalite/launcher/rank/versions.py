"""The software of this rank, told without importing it: versions of packages, and what the compiled library is."""

import json
import platform
from pathlib import Path

from megalite.version import __version__, package_version

_PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors")
_RECORD = Path(__file__).parents[2] / "ops" / "libmegalite.json"


def software() -> dict[str, str]:
    """Return name -> version of everything that could make two ranks compute differently."""
    return {
        "megalite": __version__,
        "python": platform.python_version(),
        **{name: package_version(name) or "not installed" for name in _PACKAGES},
        "compiled operators": _library(),
    }


def _library() -> str:
    """Return the digest of the sources of the compiled library, as its record has it."""
    try:
        record = json.loads(_RECORD.read_text(encoding="utf-8"))
        return f"built from {record['sources'][:12]}" if record["library"] else "none"
    except (OSError, ValueError, KeyError, TypeError):
        return "none"
