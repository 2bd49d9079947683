"""Our streaming writer against the safetensors library."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from megalite.checkpoint.tensor_file import TensorInfo, dtype_name, write_tensor_file
from megalite.errors import CheckpointError


def write(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, str], int]:
    infos = {key: TensorInfo(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    return write_tensor_file(path, infos, tensors.__getitem__)


dtypes = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]
)
names = st.text("abc.0123/@é", min_size=1, max_size=8)


@settings(max_examples=40)
@given(
    st.dictionaries(names, st.tuples(dtypes, st.lists(st.integers(1, 5), min_size=1, max_size=3)), min_size=1)
)
def test_files_are_byte_for_byte_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    tensors = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in entries.items()}
    path = tmp_path_factory.mktemp("file") / "ours.safetensors"
    hashes, size_bytes = write(path, tensors)
    assert path.read_bytes() == save(tensors, metadata={"format": "pt"})
    assert size_bytes == path.stat().st_size and hashes.keys() == tensors.keys()


def test_transposed_tensors_are_written_row_major(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    write(tmp_path / "ours", {"transposed": tensor})
    save_file({"transposed": tensor.contiguous()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert torch.equal(load_file(tmp_path / "ours")["transposed"], tensor)


def test_one_tensor_is_asked_for_at_a_time(tmp_path: Path) -> None:
    infos = {name: TensorInfo(torch.float32, (4,)) for name in "cab"}
    asked = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.ones(4)

    write_tensor_file(tmp_path / "file", infos, read)
    assert asked == ["a", "b", "c"]


def test_a_type_that_the_format_does_not_hold_is_refused() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(CheckpointError, match=r"torch\.int8"):
        dtype_name(torch.int8)
