"""Folders of torch.distributed.checkpoint: read by region without a process group, and what is refused."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from megalite.checkpoint.regions import full_slice, index_in
from megalite.convert.torch_dcp.reader import DcpFolder
from megalite.errors import CheckpointError
from megalite.topology.sharding import TensorSlice
from tests.support.ranks import RankPool
from tests.unit.convert.test_foreign_pickle import Runs

pytestmark = pytest.mark.extended
GRID = torch.arange(84.0).view(7, 12)
BIASES = torch.arange(5.0, dtype=torch.bfloat16)


def save_sharded(folder: str) -> None:
    """On 4 ranks of a 2 x 2 mesh: a grid cut in both dims unevenly, a bias that each rank has, and objects."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    content = {
        "grid": distribute_tensor(GRID, mesh, [Shard(0), Shard(1)]),
        "rows": distribute_tensor(GRID.bfloat16(), mesh, [Replicate(), Shard(0)]),
        "nested": {"bias": BIASES, "step": torch.tensor(3.0), "betas": (0.9, 0.95), "names": ["a", "b"]},
    }
    dcp.save(content, checkpoint_id=folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "step-3"
    ranks.run(save_sharded, 4, folder=str(folder))
    return folder


@pytest.mark.parametrize(
    "region", [full_slice((7, 12)), TensorSlice((3, 5), (2, 4)), TensorSlice((0, 0), (1, 6))], ids=str
)
def test_a_region_is_read_from_the_chunks_that_it_overlaps(saved: Path, region: TensorSlice) -> None:
    folder = DcpFolder(saved)
    index = index_in(region, full_slice((7, 12)))
    assert torch.equal(folder.read("grid", region), GRID[index])
    rows = folder.read("rows", region)
    assert rows.dtype == torch.bfloat16 and torch.equal(rows, GRID.bfloat16()[index])


def test_entries_are_listed_and_objects_read(saved: Path) -> None:
    folder = DcpFolder(saved)
    folder.require_whole(folder.tensors)
    sizes = {name: (tensor.shape, len(tensor.chunks)) for name, tensor in folder.tensors.items()}
    assert sizes == {
        "grid": ((7, 12), 4),
        "rows": ((7, 12), 2),
        "nested.bias": ((5,), 1),
        "nested.step": ((), 1),
    }
    assert torch.equal(folder.read("nested.bias", TensorSlice((1,), (3,))), BIASES[1:4])
    assert folder.read("nested.step", full_slice(())) == 3
    assert folder.object("nested.betas") == (0.9, 0.95)
    with pytest.raises(CheckpointError, match=r"step-3 lacks gone, lost"):
        folder.require_whole(["grid", "gone", "lost"])


def _metadata(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def change_folder(folder: Path) -> None:
        content = pickle.loads((folder / ".metadata").read_bytes())
        changed = change(content)
        (folder / ".metadata").write_bytes(pickle.dumps(changed if changed is not None else content))

    return change_folder


def _place(**fields: object) -> Callable[[Path], object]:
    """Change where the grid's first chunk is said to be."""

    def change(content: Metadata) -> None:
        for field, value in fields.items():
            setattr(content.storage_data[MetadataIndex("grid", (0, 0))], field, value)

    return _metadata(change)


def _chunks(change: Callable[[list[ChunkStorageMetadata]], object]) -> Callable[[Path], object]:
    return _metadata(lambda content: change(content.state_dict_metadata["grid"].chunks))


def _sizes(*sizes: int) -> Callable[[Path], object]:
    def change(content: Metadata) -> None:
        entry: Any = content.state_dict_metadata["grid"]
        entry.size = entry.chunks[0].sizes = torch.Size(sizes)

    return _metadata(change)


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def _bytes_of_grid(folder: Path) -> tuple[Path, int, int]:
    place = next(x for x in DcpFolder(folder).tensors["grid"].chunks if not any(x.region.offsets)).bytes
    return place.file, place.offset, place.length


def _flip(folder: Path) -> None:
    file, offset, length = _bytes_of_grid(folder)
    content = bytearray(file.read_bytes())
    stored = GRID[:4, :6].contiguous().numpy().tobytes()
    content[content.index(stored, offset, offset + length) + 3] ^= 1
    file.write_bytes(content)


def _replaced(value: object) -> Callable[[Path], object]:
    """Write another object of torch.save where the grid's first chunk is said to be."""

    def change(folder: Path) -> None:
        torch.save(value, folder / "__9_0.distcp")
        length = (folder / "__9_0.distcp").stat().st_size
        _place(relative_path="__9_0.distcp", offset=0, length=length)(folder)

    return change


REFUSED_AT_ONCE: dict[str, tuple[Callable[[Path], object], str]] = {
    "os.system": (
        _metadata(lambda content: Runs(os.system, "touch trace")),
        "asks for posix.system, .*no code was run",
    ),
    "getattr": (_metadata(lambda content: Runs(getattr, str, "upper")), "asks for builtins.getattr"),
    "a cut metadata": (lambda folder: _cut(folder / ".metadata", 9), "metadata is not a complete pickle"),
    "another file's magic": (
        lambda folder: (folder / ".metadata").write_bytes(b"version https://git-lfs"),
        "metadata is not a complete pickle",
    ),
    "a long string of 2^60 bytes": (
        lambda folder: (folder / ".metadata").write_bytes(
            b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"a."
        ),
        "metadata is not a complete pickle",
    ),
    "an array of 2^40 bytes": (
        lambda folder: (folder / ".metadata").write_bytes(
            b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"."
        ),
        "metadata is not a complete pickle",
    ),
    "no metadata": (_metadata(lambda content: {"a": 1}), "is no Metadata"),
    "a climb": (
        _place(relative_path="../x"),
        r"grid is said to be in '\.\./x', which is not the name of a file",
    ),
    "an absolute path": (_place(relative_path="/etc/passwd"), "is said to be in '/etc/passwd'"),
    "a folder": (_place(relative_path=".."), r"is said to be in '\.\.'"),
    "an offset of 2^60": (_place(offset=1 << 60), "grid is said to end at byte 1,152,921,504,606"),
    "a length of 2^80": (_place(length=1 << 80), "the place of 'grid' is no offset and length"),
    "a negative offset": (_place(offset=-8), "the place of 'grid' is no offset and length"),
    "a transform": (_place(transform_descriptors=["zstd"]), "was saved with a transform"),
    "an absent file": (
        lambda folder: (folder / "__2_0.distcp").unlink(),
        "lacks __2_0.distcp; fetch every file",
    ),
    "a cut file": (
        lambda folder: _cut(folder / "__2_0.distcp", 50),
        "__2_0.distcp has .* the file is cut short",
    ),
    "2^60 rows": (_sizes(1 << 60, 12), "a chunk of grid of .* is said to be in"),
    "a chunk outside": (_sizes(7), r"a chunk of|has shape"),
}
REFUSED_WHEN_READ: dict[str, tuple[Callable[[Path], object], str]] = {
    "a chunk too few": (_chunks(lambda chunks: chunks.__delitem__(0)), "grid is not whole: its chunks have"),
    "a flipped bit": (_flip, "data/0 does not match its checksum"),
    "os.system in a chunk": (
        _replaced(Runs(os.system, "touch trace")),
        "grid asks for posix.system, .*no code was run",
    ),
    "another object in a chunk": (_replaced([1]), "the chunk of grid at .* is not the torch.float32 tensor"),
    "another shape in a chunk": (
        _replaced(torch.ones(6, 4)),
        "the chunk of grid at .* is not the torch.float32 tensor",
    ),
    "an expanded tensor": (_replaced(torch.ones(1).expand(1 << 40)), "grid: the file has 4,398,046,511,104"),
    "a tensor without values": (_replaced(torch.ones(4, 6, device="meta")), "is not a dense tensor"),
    "no zip": (
        lambda folder: (folder / _bytes_of_grid(folder)[0]).write_bytes(bytes(1 << 14)),
        "is not a complete file of torch.save",
    ),
}


def _changed(saved: Path, tmp_path: Path, change: Callable[[Path], object]) -> Path:
    folder = tmp_path / "step-3"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    return folder


@pytest.mark.parametrize("case", REFUSED_AT_ONCE)
def test_metadata_that_cannot_be_true_is_refused(saved: Path, tmp_path: Path, case: str) -> None:
    change, message = REFUSED_AT_ONCE[case]
    folder = _changed(saved, tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        DcpFolder(folder)


@pytest.mark.parametrize("case", REFUSED_WHEN_READ)
def test_chunks_other_than_promised_are_refused(saved: Path, tmp_path: Path, case: str) -> None:
    change, message = REFUSED_WHEN_READ[case]
    folder = DcpFolder(_changed(saved, tmp_path, change))
    with pytest.raises(CheckpointError, match=message):
        folder.require_whole(["grid"])
        folder.read("grid", full_slice((7, 12)))


def test_a_region_that_no_chunk_has_whole_is_no_tensor_of_what_was_in_memory(
    saved: Path, tmp_path: Path
) -> None:
    folder = DcpFolder(_changed(saved, tmp_path, REFUSED_WHEN_READ["a chunk too few"][0]))
    with pytest.raises(CheckpointError, match="the chunks of grid do not hold each element of"):
        folder.read("grid", full_slice((7, 12)))


def test_chunks_that_overlap_are_named(saved: Path, tmp_path: Path) -> None:
    def shift(content: Metadata) -> None:
        index = MetadataIndex("grid", (0, 6))
        place = content.storage_data.pop(index)
        content.storage_data[MetadataIndex("grid", (0, 5))] = place
        entry: Any = content.state_dict_metadata["grid"]
        next(chunk for chunk in entry.chunks if tuple(chunk.offsets) == (0, 6)).offsets = torch.Size((0, 5))

    folder = DcpFolder(_changed(saved, tmp_path, _metadata(shift)))
    with pytest.raises(
        CheckpointError, match=r"grid is not whole: its chunks at \(0, 0\) .* at \(0, 5\) .* overlap"
    ):
        folder.require_whole(["grid"])


@pytest.mark.parametrize("other", ["rows", "nested.bias"])
def test_bytes_that_are_said_to_be_of_two_tensors_are_checked_for_both(
    saved: Path, tmp_path: Path, other: str
) -> None:
    """The chunk that was read last is kept: it is of another shape, or of another dtype, than the second tensor."""

    def same_bytes(content: Metadata) -> None:
        places = content.storage_data
        entry: Any = content.state_dict_metadata[other]
        entry.size = torch.Size((4, 6) if other == "rows" else (5,))
        entry.chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * len(entry.size)), sizes=entry.size)]
        for key in [key for key in places if key.fqn == other]:
            places.pop(key)
        index = MetadataIndex(other, entry.chunks[0].offsets)
        places[index] = places[MetadataIndex("grid", (0, 0))]

    folder = DcpFolder(_changed(saved, tmp_path, _metadata(same_bytes)))
    folder.read("grid", TensorSlice((0, 0), (4, 6)))
    tensor = folder.tensors[other]
    with pytest.raises(CheckpointError, match=f"the chunk of {other} at .* is not the torch.bfloat16 tensor"):
        folder.read(other, full_slice(tensor.shape))


def test_a_chunk_that_is_listed_twice_counts_once(saved: Path, tmp_path: Path) -> None:
    folder = DcpFolder(_changed(saved, tmp_path, _chunks(lambda chunks: chunks.extend(chunks[:2]))))
    folder.require_whole(["grid"])
    values: Tensor = folder.read("grid", full_slice((7, 12)))
    assert torch.equal(values, GRID)


def test_an_endless_text_of_a_hostile_object_is_not_made(saved: Path, tmp_path: Path) -> None:
    """Sixty lists that hold the one before them twice have 2^60 words."""
    nested: Any = ["word"]
    for _ in range(60):
        nested = [nested, nested]
    folder = _changed(saved, tmp_path, _metadata(lambda content: [nested]))
    with pytest.raises(CheckpointError, match="a list is no Metadata"):
        DcpFolder(folder)
