"""Memory of an export and bytes read by an import: a model of 3.5 GB in float32.

    python -m benchmarks.checkpoint_memory [--folder FOLDER] [--quick]

A Llama with the sizes of Llama 3.2 1B but 10 layers for 16 (its tied embedding alone has 1.05 GB), of random weights,
is written as the checkpoint of a run of tensor 2 x pipeline 2, one tensor after the other. One process exports it, with
the comparison by transformers' modules; then four ranks start from the exported folder (`model.weights`), which the
kernel was asked to forget, once as tensor 2 x pipeline 2 and once as tensor 4.

start, peak    the process's resident memory before, with torch, its compiler and transformers loaded, and at most
               (VmRSS; VmHWM, reset before): of all kinds, mapped files and what transformers' modules take when they
               are imported included. With ranks, the rank that grew most; "model" is a rank's share of the model.
read           bytes that a rank read (rchar of /proc/self/io), headers included, as a multiple of those of the slices
               that it holds, in the files' type; the most of any rank.
from disk      bytes that all ranks together had to have from the disk (read_bytes), as a multiple of the files' bytes.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.loader import forget
from benchmarks.ranks import run_ranks
from megalite.topology.axes import Layout
from megalite.topology.parameters import Parameter, stage_parameters
from megalite.topology.place import RankPlace
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit, pipeline_split

MB = 10**6
MIB = 1 << 20
SHAPE = ModelShape(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=10,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
# More than the size below which an export loads the whole model too.
QUICK_SHAPE = replace(
    SHAPE,
    vocab_size=66000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=12,
    num_key_value_heads=4,
)
WRITTEN_BY = Layout(tensor=2, pipeline=2)
IMPORTED_BY = (Layout(tensor=2, pipeline=2), Layout(tensor=4))


def write_checkpoint(run: Path, shape: ModelShape) -> Path:
    """The first checkpoint of a run, of random weights; each rank's file in turn, one tensor in memory."""
    import torch

    import megalite
    from megalite.checkpoint.folder import published_name
    from megalite.checkpoint.manifest import WEIGHT, Manifest, Shard, TensorEntry
    from megalite.checkpoint.publish import publish
    from megalite.checkpoint.tensor_file import TensorInfo, write_tensor_file

    split = pipeline_split(shape.num_hidden_layers, WRITTEN_BY.pipeline)
    folder = run / "checkpoints" / ".step-000001.partial-0"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    entries: dict[str, TensorEntry] = {}
    sizes: dict[str, int] = {}
    for rank in range(WRITTEN_BY.world_size):
        place, file = RankPlace(WRITTEN_BY, rank), f"rank-{rank:05d}.safetensors"
        regions = {
            f"{WEIGHT}/{part.name}": (part, region)
            for parameter, part, region in slices_of(shape, split, place)
            if place.is_first_stage(parameter) and place.is_first_holder(parameter, part)
        }

        def read(key: str, regions: dict[str, Any] = regions) -> torch.Tensor:
            values = torch.randn(regions[key][1].shape, generator=generator)
            return values.mul_(0.02) if values.dim() > 1 else values.mul_(0.1).add_(1)

        infos = {key: TensorInfo(torch.float32, region.shape) for key, (_, region) in regions.items()}
        hashes, sizes[file] = write_tensor_file(folder / file, infos, read)
        for key, (part, region) in regions.items():
            before = entries.get(part.name, TensorEntry(part.shape, "float32", ()))
            shard = Shard(file, key, region.offsets, region.shape, None, hashes[key])
            entries[part.name] = replace(before, shards=(*before.shards, shard))
    manifest = Manifest(
        megalite=megalite.__version__,
        torch=torch.__version__,
        trainer_state={"step": 1, "samples": 0, "tokens": 0},
        layout=WRITTEN_BY,
        stage_layers=tuple(split.layers_of(stage) for stage in range(split.stages)),
        model=shape,
        config={},
        optimizer={},
        tensors={WEIGHT: entries},
        files=sizes,
    )
    published = folder.with_name(published_name(1))
    publish(manifest, folder, published)
    return published


def slices_of(
    shape: ModelShape, split: PipelineSplit, place: RankPlace
) -> Iterator[tuple[Parameter, Any, Any]]:
    """Yield a rank's share: registered parameter, canonical tensor, slice of the tensor."""
    for parameter in stage_parameters(shape, split, place.at.pp):
        for part, region in place.slices(parameter):
            yield parameter, part, region


class Memory:
    """This process's resident memory from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.start_bytes = self._bytes("VmRSS")

    @property
    def peak_bytes(self) -> int:
        return self._bytes("VmHWM")

    @staticmethod
    def _bytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
        return int(kilobytes) * 1024


def counters() -> dict[str, int]:
    """Return the bytes that this process has read: `rchar` by its calls, `read_bytes` from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def exporting(checkpoint: Path, destination: Path) -> dict[str, float]:
    import torch
    import torch._dynamo  # transformers' modules import the compiler
    import transformers  # noqa: F401

    from megalite.convert.huggingface.export import export

    torch.set_num_threads(2)
    memory, began = Memory(), time.perf_counter()
    export(checkpoint, destination, None)
    seconds = time.perf_counter() - began
    return {"start": memory.start_bytes, "peak": memory.peak_bytes, "seconds": seconds}


def importing(folder: Path, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """This rank's figures."""
    from megalite.checkpoint.weights import fill
    from megalite.convert.weight_source import WeightSource
    from megalite.convert.weights import open_weights
    from megalite.model.stages import build_replica
    from megalite.parallel.mesh import ParallelMesh

    mesh = ParallelMesh.over_world(layout)
    split = pipeline_split(shape.num_hidden_layers, layout.pipeline)
    mesh.barrier()
    memory, before, began = Memory(), counters(), time.perf_counter()
    replica = build_replica(shape, mesh, split, seed=None)
    fill(replica, open_weights(WeightSource(folder, "huggingface", shape)), folder)
    seconds, after = time.perf_counter() - began, counters()
    held = slices_of(shape, split, mesh)
    return {
        "start": memory.start_bytes,
        "peak": memory.peak_bytes,
        "seconds": seconds,
        "model": sum(parameter.nbytes for parameter in replica.stage.parameters()),
        "needed": sum(4 * region.numel for _, _, region in held),
        "read": after["rchar"] - before["rchar"],
        "from_disk": after["read_bytes"] - before["read_bytes"],
    }


def row_of(case: str, found: list[dict[str, float]], files_bytes: int) -> dict[str, Any]:
    worst = max(found, key=lambda each: each["peak"] - each["start"])
    row = {
        "case": case,
        "processes": len(found),
        "megabytes": round(files_bytes / MB),
        "seconds": round(max(each["seconds"] for each in found), 1),
        "start_mib": round(worst["start"] / MIB),
        "peak_mib": round(worst["peak"] / MIB),
        "above_start_mib": round((worst["peak"] - worst["start"]) / MIB),
        "model_mib": None,
        "read_ratio": None,
        "from_disk_ratio": None,
    }
    if "needed" in worst:
        row["model_mib"] = round(worst["model"] / MIB)
        row["read_ratio"] = round(max(each["read"] / each["needed"] for each in found), 4)
        row["from_disk_ratio"] = round(sum(each["from_disk"] for each in found) / files_bytes, 3)
    return row


def main() -> None:
    parser = report.parser_of(__doc__)
    parser.add_argument(
        "--folder", type=Path, help="with room for the model twice; default: that of temporary files"
    )
    options = report.arguments_of(parser)
    facts = report.machine()
    shape = QUICK_SHAPE if options.quick else SHAPE
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        checkpoint, exported = write_checkpoint(Path(name), shape), Path(name) / "export"
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = [pool.apply(exporting, (checkpoint, exported))]
        files = list(exported.glob("*.safetensors"))
        size_bytes = sum(path.stat().st_size for path in files)
        rows = [row_of("export", found, size_bytes)]
        for layout in IMPORTED_BY:
            for path in files:
                forget(path)
            found = run_ranks(importing, layout.world_size, exported, shape, layout)
            rows.append(
                row_of(f"import, tensor {layout.tensor} x pipeline {layout.pipeline}", found, size_bytes)
            )
    columns = {"case": "case", "processes": "processes", "megabytes": "MB", "seconds": "s"}
    columns |= {"start_mib": "start, MiB", "peak_mib": "peak, MiB", "above_start_mib": "above start, MiB"}
    columns |= {"model_mib": "model, MiB", "read_ratio": "read", "from_disk_ratio": "from disk"}
    report.show("memory of an export, bytes of an import", rows, columns)
    settings = {"quick": options.quick, "threads": 2, "model": vars(shape)}
    report.write("checkpoint-memory", facts, settings, rows, options.results)


if __name__ == "__main__":
    main()
