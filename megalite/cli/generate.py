"""megalite generate: continue a text with a checkpoint of any layout, on one or more ranks."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.folder import find_checkpoint, find_tokenizer, require_whole
from megalite.checkpoint.manifest import Manifest
from megalite.cli.arguments import Parser, whole_number
from megalite.errors import CheckpointError, ConfigError, Problem
from megalite.launcher.detect import RankInfo
from megalite.launcher.environment import prepare_process
from megalite.topology.axes import Layout
from megalite.topology.sharding import heads_fit

if TYPE_CHECKING:
    from megalite.data.tokenizer import Tokenizer
    from megalite.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class _Request:
    """The arguments that every rank gets."""

    checkpoint: Path
    tokenizer: Path
    end_of_document: str | None
    prompt: str
    tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    layout: Layout


def run(arguments: Sequence[str]) -> int:
    """Print the prompt and its continuation; return the exit code. Raises CheckpointError, DataError, ConfigError."""
    options = _parser().parse_args(arguments)
    checkpoint = find_checkpoint(options.checkpoint)
    manifest = require_whole(checkpoint)
    check_coverage(manifest, checkpoint)
    tokenizer = options.tokenizer or find_tokenizer(checkpoint, manifest)
    if tokenizer is None:
        raise CheckpointError(f"no tokenizer was found for {checkpoint}; name one with --tokenizer")
    layout = Layout(pipeline=options.pipeline, tensor=options.tensor)
    _check(options, manifest)
    request = _Request(
        checkpoint,
        tokenizer,
        (manifest.config.get("tokenizer") or {}).get("end_of_document"),
        options.prompt,
        options.tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
        layout,
    )
    # torch is imported below this line, so that --help and a wrong request are answered at once.
    if layout.world_size == 1:
        from megalite.parallel.device import local_device
        from megalite.parallel.mesh import ParallelMesh

        _generate(request, ParallelMesh.single(local_device(0, 1)))
        return 0
    threads = prepare_process("auto", local_ranks=layout.world_size, info=None)
    from megalite.launcher.local import run_local_ranks

    with tempfile.TemporaryDirectory(prefix="megalite-generate-") as scratch:
        preload = ["torch", "megalite.generate.engine"]
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
    """Load the model, sample the tokens and print the text on rank 0."""
    from megalite.data.tokenizer import load_tokenizer
    from megalite.generate.engine import generate, load_model
    from megalite.generate.sampling import Sampling

    tokenizer = load_tokenizer(request.tokenizer, end_of_document=request.end_of_document)
    model = load_model(request.checkpoint, mesh)
    started = time.perf_counter()
    prompt_ids = _prompt_ids(tokenizer, request.prompt)
    new_ids = generate(
        model,
        prompt_ids,
        new_tokens=request.tokens,
        sampling=Sampling(request.temperature, request.top_k, request.top_p, request.seed),
        stop_ids={tokenizer.end_of_document_id},
    )
    ids = list(new_ids)
    seconds = time.perf_counter() - started
    if mesh.rank == 0:
        print(request.prompt + _continuation(tokenizer, prompt_ids, ids), flush=True)
        print(f"{request.checkpoint}: {len(ids)} tokens in {seconds:.2f} s", file=sys.stderr, flush=True)


def _prompt_ids(tokenizer: "Tokenizer", prompt: str) -> list[int]:
    """Encode the prompt as transformers does: with the tokenizer's start token, without its end token."""
    ids: list[int] = tokenizer.backend.encode(prompt).ids
    return ids[:-1] if ids[-1:] == [tokenizer.end_of_document_id] else ids


def _continuation(tokenizer: "Tokenizer", prompt_ids: list[int], new_ids: list[int]) -> str:
    """Decode the new tokens after the prompt: decoded alone, many tokenizers drop the leading space."""
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt_ids, *new_ids], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(new_ids, skip_special_tokens=True)  # the prompt ended inside a UTF-8 character


def _check(options: argparse.Namespace, manifest: Manifest) -> None:
    """Raise ConfigError for a layout that the model does not fit, or sampling options without effect."""
    shape = manifest.model
    problems = []
    query, shared = shape.num_attention_heads, shape.num_key_value_heads
    if query % options.tensor or not heads_fit(shared, options.tensor):
        message = (
            f"{options.tensor} tensor-parallel ranks cannot share {query} query and {shared} key-value heads"
        )
        sizes = [n for n in range(1, query + 1) if query % n == 0 and heads_fit(shared, n)]
        remedy = f"use one of {sizes}"
        problems.append(Problem("--tensor", message, remedy))
    if options.pipeline > shape.num_hidden_layers:
        message = f"{options.pipeline} stages are more than the model's {shape.num_hidden_layers} layers"
        problems.append(Problem("--pipeline", message, f"use at most {shape.num_hidden_layers}"))
    if options.temperature == 0 and (options.top_k or options.top_p < 1):
        message = "has no effect with --temperature 0, which takes the most likely token"
        remedy = "set --temperature above 0, for example 1"
        problems.append(Problem("--top-k" if options.top_k else "--top-p", message, remedy))
    if problems:
        raise ConfigError(problems, "the request")


def _temperature(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; use 0 or more")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability; use more than 0 and at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megalite generate", description=__doc__)
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint folder, or run folder for its latest checkpoint",
    )
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add("--tokens", type=whole_number(1), default=64, metavar="N", help="maximum number of new tokens (64)")
    add(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0: greedy (0)",
    )
    add(
        "--top-k",
        type=whole_number(1),
        default=0,
        metavar="K",
        help="sample only from the K most likely tokens",
    )
    add(
        "--top-p",
        type=_share,
        default=1.0,
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
    add("--tokenizer", type=Path, metavar="FOLDER", help="the model's tokenizer (default: the run's)")
    return parser
