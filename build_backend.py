"""The build backend: setuptools', which also asks for torch if a compiler can build the operators.

pip builds in an environment of its own, and the operators are compiled against torch's headers. Without a compiler,
or with MEGALITE_OPERATORS=0, nothing is downloaded and the wheel is pure Python (its name ends in py3-none-any).
"""

import os
import platform
import shutil
from collections.abc import Mapping

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, str | list[str] | None] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *torch_requirement()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *torch_requirement()]


def torch_requirement() -> list[str]:
    """Return the requirement of torch; empty where setup.py would compile nothing."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    wanted = os.environ.get("MEGALITE_OPERATORS") != "0"
    return ["torch>=2.13"] if wanted and compiler and platform.system() == "Linux" else []
