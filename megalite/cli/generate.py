"""megalite generate: continue a text with a checkpoint or a Hugging Face folder, on one or more ranks."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.cli.arguments import Parser, whole_number
from megalite.cli.model_layout import layout_problems
from megalite.errors import ConfigError
from megalite.generation.request import Sampling, sampling_problems
from megalite.generation.source import ModelSource, find_source
from megalite.launcher.detect import RankInfo
from megalite.launcher.environment import prepare_process
from megalite.topology.axes import Layout
from megalite.topology.shape import ModelShape

if TYPE_CHECKING:
    from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class _Request:
    """The arguments that every rank gets."""

    source: ModelSource
    prompt: str
    tokens: int
    sampling: Sampling
    layout: Layout


def run(arguments: Sequence[str]) -> int:
    """Print the prompt and its continuation; return the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = _parser().parse_args(arguments)
    source = find_source(options.model, tokenizer=options.tokenizer, base=options.base)
    _check(options, source.shape)
    top_p = 1.0 if options.top_p is None else options.top_p
    sampling = Sampling(options.temperature, options.top_k or 0, top_p, options.seed)
    layout = Layout(pipeline=options.pipeline, tensor=options.tensor)
    request = _Request(source, options.prompt, options.tokens, sampling, layout)
    # torch is imported below this line, so that --help and a wrong request are answered at once.
    if layout.world_size == 1:
        from megalite.parallel.device import local_device
        from megalite.parallel.mesh import ParallelMesh

        _generate(request, ParallelMesh.single(local_device(0, 1)))
        return 0
    threads = prepare_process("auto", local_ranks=layout.world_size, info=None)
    from megalite.launcher.local import run_local_ranks

    with tempfile.TemporaryDirectory(prefix="megalite-generate-") as scratch:
        preload = ["torch", "megalite.generation.text"]
        return run_local_ranks(
            _generate_on_rank, layout, Path(scratch), arguments=(request, threads), preload=preload
        )


def _generate_on_rank(info: RankInfo, request: _Request, threads: int) -> int:
    import torch

    from megalite.parallel.device import local_device
    from megalite.parallel.mesh import ParallelMesh, connect, disconnect

    torch.set_num_threads(threads)
    device = local_device(info.local_rank, info.local_world_size)
    connect(info.rank, info.world_size, device=device, rendezvous=info.rendezvous)
    _generate(request, ParallelMesh.over_world(request.layout, device))
    disconnect()
    return 0


def _generate(request: _Request, mesh: "ParallelMesh") -> None:
    """Load the model, generate, and print the text on rank 0."""
    from megalite.generation.text import continue_text, load_source

    loaded = load_source(request.source, mesh)
    started = time.perf_counter()
    try:
        found = continue_text(loaded, request.prompt, request.tokens, request.sampling)
    except ConfigError as error:
        problems = [replace(problem, key=_flag(problem.key)) for problem in error.problems]
        raise ConfigError(problems, error.source) from error
    seconds = time.perf_counter() - started
    if mesh.rank == 0:
        print(found.text, flush=True)
        print(
            f"{request.source.folder}: {found.new_tokens} tokens in {seconds:.2f} s",
            file=sys.stderr,
            flush=True,
        )


def _check(options: argparse.Namespace, shape: ModelShape) -> None:
    """Raise ConfigError for a layout that the model does not fit, or wrong sampling options."""
    problems = list(layout_problems(options.tensor, options.pipeline, shape))
    problems += sampling_problems(options.tokens, options.temperature, options.top_k, options.top_p, _flag)
    if problems:
        raise ConfigError(problems, "the request")


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite generate", description=__doc__)
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="run folder (its latest checkpoint), checkpoint folder, Hugging Face folder, or org/name on its Hub",
    )
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add("--tokens", type=whole_number(1), default=64, metavar="N", help="maximum number of new tokens (64)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0: greedy (0)",
    )
    add(
        "--top-k",
        type=whole_number(1),
        metavar="K",
        help="sample only from the K most likely tokens",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the fewest tokens with total probability P",
    )
    add("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    add("--tensor", type=whole_number(1), default=1, metavar="N", help="tensor-parallel size (1)")
    add(
        "--pipeline",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="pipeline-parallel size (1)",
    )
    add("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer folder (default: the model's own)")
    add("--base", type=Path, metavar="FOLDER", help="the weights beside an adapter, where they have moved")
    return parser
