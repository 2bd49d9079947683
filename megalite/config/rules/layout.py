"""Rules over [parallel]: tensor-parallel size against the model's sizes, layout against the number of ranks."""

from collections.abc import Iterator

from megalite.config.sections.checked import CheckedRun
from megalite.errors import Problem
from megalite.launcher.rank.rank_count import how_to_start, ranks_started
from megalite.topology.axes import Layout
from megalite.topology.sharding import heads_fit, tensor_sizes


def tensor_divides_attention_heads(run: CheckedRun) -> Iterator[Problem]:
    tensor, heads = run.parallel.tensor, run.model.num_attention_heads
    if heads % tensor:
        message = f"{tensor} does not divide model.num_attention_heads = {heads}"
        yield Problem("parallel.tensor", message, *_use_for_heads(run))


def tensor_fits_key_value_heads(run: CheckedRun) -> Iterator[Problem]:
    tensor, heads = run.parallel.tensor, run.model.num_key_value_heads
    if heads is not None and not heads_fit(heads, tensor):
        message = f"{tensor} neither divides model.num_key_value_heads = {heads} nor is a multiple of it"
        yield Problem("parallel.tensor", message, *_use_for_heads(run))


def _use_for_heads(run: CheckedRun) -> tuple[str, dict[str, int]]:
    """Return a remedy with the tensor-parallel sizes that suit the heads, and the nearest smaller one to set."""
    query = run.model.num_attention_heads
    shared = run.model.num_key_value_heads or query
    sizes = tensor_sizes(query, shared)
    nearest = max(size for size in sizes if size <= run.parallel.tensor)
    return f"use one of {sizes}" if len(sizes) > 1 else f"use {sizes[0]}", {"parallel.tensor": nearest}


def zero_3_splits_no_shared_head(run: CheckedRun) -> Iterator[Problem]:
    tensor, heads = run.parallel.tensor, run.model.num_key_value_heads
    if heads is not None and run.zero_stage == 3 and tensor > heads:
        source = run.source("deepspeed.zero_optimization")
        message = f"3 {source} cannot partition copies of key-value heads, but parallel.tensor = {tensor} is more than "
        message += f"model.num_key_value_heads = {heads}"
        yield Problem(
            "deepspeed.zero_optimization.stage",
            message,
            f"use 1 or 2, or parallel.tensor {heads}",
            {"parallel.tensor": heads},
        )


def tensor_fits_intermediate_size(run: CheckedRun) -> Iterator[Problem]:
    tensor, size = run.parallel.tensor, run.model.intermediate_size
    if tensor > size:
        message = f"{tensor} ranks cannot share model.intermediate_size = {size}"
        yield Problem.reset("parallel.tensor", message, f"use at most {size}", size)


def tensor_fits_vocabulary(run: CheckedRun) -> Iterator[Problem]:
    tensor, size = run.parallel.tensor, run.model.vocab_size
    if size != "auto" and tensor > size:
        yield Problem.reset(
            "parallel.tensor",
            f"{tensor} ranks cannot share model.vocab_size = {size}",
            f"use at most {size}",
            size,
        )


def ranks_make_whole_replicas(run: CheckedRun) -> Iterator[Problem]:
    world, layout = run.world_size, Layout.of(run.parallel)
    replica = layout.replica_size
    if world is None or run.parallel.data != "auto" or world % replica == 0:
        return
    started = ranks_started(world, run.launched)
    sizes = " x ".join(f"{name} {size}" for name, size in layout.named_sizes.items() if name != "data")
    message = f"{sizes} = {replica} does not divide the {started}"
    nearest = [each for each in (world // replica * replica, (world // replica + 1) * replica) if each]
    yield Problem("parallel.data", message, how_to_start(nearest, run.launched))


def ranks_fill_the_layout(run: CheckedRun) -> Iterator[Problem]:
    world, data = run.world_size, run.parallel.data
    if world is None or data == "auto":
        return
    layout = Layout.of(run.parallel, data)
    if world != layout.world_size:
        started = ranks_started(world, run.launched)
        message = f"{layout.text} = {layout.world_size}, not the {started}"
        automatic = "" if world % layout.replica_size else 'use "auto", or '
        cure = {"parallel.data": "auto"} if automatic else {}
        yield Problem(
            "parallel.data", message, automatic + how_to_start([layout.world_size], run.launched), cure
        )


def zero_fits_the_pipeline(run: CheckedRun) -> Iterator[Problem]:
    stage, stages = run.zero_stage, run.parallel.pipeline
    if stage >= 2 and stages > 1:
        source = run.source("deepspeed.zero_optimization")
        does = "reduces gradients" if stage == 2 else "gathers weights"
        message = (
            f"{stage} {source} {does} in every micro batch, but parallel.pipeline = {stages} interleaves them"
        )
        yield Problem.reset("deepspeed.zero_optimization.stage", message, "use 1, or parallel.pipeline 1", 1)
