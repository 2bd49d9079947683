"""torch.compile below a path with white space: torch 2.13 does not quote the folder of its libraries for the linker."""

from pathlib import Path

import pytest
from torch.utils import cpp_extension

from megalite.model import layer


def test_the_linker_reaches_the_libraries_by_a_path_without_white_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a path" / "lib").mkdir(parents=True)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(tmp_path / "a path" / "lib"))
    layer.name_libraries_without_spaces()
    assert " " not in cpp_extension.TORCH_LIB_PATH
    assert Path(cpp_extension.TORCH_LIB_PATH).resolve() == (tmp_path / "a path" / "lib").resolve()
