"""megalite generate: continue a text with a checkpoint of any layout, on one or several ranks."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.checkpoint.folder import find_checkpoint, find_tokenizer, require_whole
from megalite.checkpoint.format import Manifest, check_coverage
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
    """What every rank is told."""

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
    """Print the prompt and what follows it; returns the exit code, raises CheckpointError, DataError, ConfigError."""
    options = _parser().parse_args(arguments)
    checkpoint = find_checkpoint(options.checkpoint)
    manifest = require_whole(checkpoint)
    check_coverage(manifest, checkpoint)
    tokenizer = options.tokenizer or find_tokenizer(checkpoint, manifest)
    if tokenizer is None:
        raise CheckpointError(f"no tokenizer was found beside {checkpoint}; name one with --tokenizer")
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
    # What needs torch is imported late, so that --help and a wrong request are answered at once.
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
    """Load the model, draw the tokens, print the text on the first rank."""
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
    """The prompt as transformers would start it: with the tokenizer's own first token, if it has one."""
    ids: list[int] = tokenizer.backend.encode(prompt).ids
    return ids[:-1] if ids[-1:] == [tokenizer.end_of_document_id] else ids


def _continuation(tokenizer: "Tokenizer", prompt_ids: list[int], new_ids: list[int]) -> str:
    """The text of the new tokens where they stand: alone, many tokenizers drop the space before the first of them."""
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt_ids, *new_ids], skip_special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(new_ids, skip_special_tokens=True)  # the prompt ended within a character


def _check(options: argparse.Namespace, manifest: Manifest) -> None:
    """Raises ConfigError for ranks that the model cannot be spread over."""
    shape = manifest.model
    problems = []
    query, shared = shape.num_attention_heads, shape.num_key_value_heads
    if query % options.tensor or not heads_fit(shared, options.tensor):
        message = f"{options.tensor} ranks cannot share {query} query and {shared} key-value heads"
        remedy = "use a divisor of the first that divides the second or is a multiple of it"
        problems.append(Problem("--tensor", message, remedy))
    if options.pipeline > shape.num_hidden_layers:
        message = f"{options.pipeline} stages cannot each have one of {shape.num_hidden_layers} layers"
        problems.append(Problem("--pipeline", message, f"use at most {shape.num_hidden_layers}"))
    if options.temperature == 0 and (options.top_k or options.top_p < 1):
        message = "has no meaning for the likeliest token only"
        problems.append(Problem("--top-k" if options.top_k else "--top-p", message, "set --temperature too"))
    if problems:
        raise ConfigError(problems, "the request")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


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
    parser = argparse.ArgumentParser(prog="megalite generate", description=__doc__)
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint's folder, or a run's: its latest one",
    )
    add("--prompt", required=True, metavar="TEXT", help="the text to continue")
    add("--tokens", type=_positive, default=64, metavar="N", help="most tokens to add (64)")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="0 takes the likeliest token (0)")
    add("--top-k", type=_positive, default=0, metavar="K", help="draw from the K likeliest tokens only")
    add("--top-p", type=_share, default=1.0, metavar="P", help="draw from the fewest that have probability P")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (0)")
    add("--tensor", type=_positive, default=1, metavar="N", help="ranks that share each layer (1)")
    add(
        "--pipeline",
        type=_positive,
        default=1,
        metavar="N",
        help="stages that the layers are spread over (1)",
    )
    add("--tokenizer", type=Path, metavar="FOLDER", help="the model's tokenizer (default: that of the run)")
    return parser
