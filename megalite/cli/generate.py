"""megalite generate: greedy text from a checkpoint of any layout, in one process."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.checkpoint.folder import find_checkpoint, find_tokenizer, require_whole
from megalite.errors import CheckpointError


def run(arguments: Sequence[str]) -> int:
    """Print the prompt and what follows it; returns the exit code, raises CheckpointError, DataError, ConfigError."""
    options = _parser().parse_args(arguments)
    checkpoint = find_checkpoint(options.checkpoint)
    manifest = require_whole(checkpoint)
    tokenizer_path = options.tokenizer or find_tokenizer(checkpoint, manifest)
    if tokenizer_path is None:
        raise CheckpointError(f"no tokenizer was found beside {checkpoint}; name one with --tokenizer")
    # Imported late, so that --help and a wrong path are answered at once.
    from megalite.data.tokenizer import END_OF_DOCUMENT, load_tokenizer
    from megalite.generate.engine import generate_greedily, load_model

    trained_with = (manifest.config.get("tokenizer") or {}).get("end_of_document")
    tokenizer = load_tokenizer(tokenizer_path, end_of_document=trained_with or END_OF_DOCUMENT)
    prompt_ids = tokenizer.encode(options.prompt)
    stage = load_model(checkpoint)
    started = time.perf_counter()
    new_ids = generate_greedily(
        stage, prompt_ids, new_tokens=options.tokens, stop_ids={tokenizer.end_of_document_id}
    )
    ids = list(new_ids)
    seconds = time.perf_counter() - started
    print(options.prompt + tokenizer.decode(ids, skip_special_tokens=True))
    print(f"{checkpoint}: {len(ids)} tokens in {seconds:.2f} s", file=sys.stderr)
    return 0


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; use 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite generate", description=__doc__)
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint's folder, or a run's: its latest one",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.add_argument("--tokens", type=_tokens, default=64, metavar="N", help="most tokens to add (64)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="the model's tokenizer (default: that of the run)"
    )
    return parser
