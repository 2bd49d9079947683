"""The position of a run in streamed text: gathered for a checkpoint, and taken up from one."""

from dataclasses import astuple

from megalite.checkpoint.manifest import Stream
from megalite.data.batches.stream_lane import LanePlace
from megalite.data.batches.stream_loader import StreamLoader, TrainingLoader
from megalite.parallel.mesh import ParallelMesh


def gathered_position(loader: TrainingLoader, samples: int, mesh: ParallelMesh) -> Stream | None:
    """Return on rank 0 where each lane stands after `samples`; None elsewhere, and for other loaders. Collective."""
    if not isinstance(loader, StreamLoader):
        return None
    places: dict[int, LanePlace] = {}
    for of_rank in mesh.gather_objects(loader.places(samples)) or ():
        places |= of_rank
    if mesh.rank != 0:
        return None
    files = tuple((file.path.name, file.size_bytes) for file in loader.text.files)
    return Stream(files, tuple(astuple(places[lane]) for lane in sorted(places)))


def go_on(loader: TrainingLoader, samples: int, position: Stream | None) -> None:
    """Let a streaming loader go on where a checkpoint was written, after `samples`.

    With other files or another global batch size (checkpoint.resume_changed) it begins with the first documents.
    """
    if not isinstance(loader, StreamLoader):
        return
    sizes = [file.size_bytes for file in loader.text.files]
    if (
        position is not None
        and len(position.lanes) == loader.global_batch_size
        and [size for _, size in position.files] == sizes
    ):
        loader.go_on(samples, [LanePlace(*lane) for lane in position.lanes])
    else:
        loader.go_on(samples)
