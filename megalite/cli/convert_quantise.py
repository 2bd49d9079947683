"""megalite convert export --quantise int8: what it costs, in perplexity and bytes."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.cli.results import report
from megalite.errors import ConfigError, Problem

if TYPE_CHECKING:
    from megalite.convert.huggingface.export import Export


def add_quantise(export: argparse.ArgumentParser) -> None:
    """Add the flags to the parser of `megalite convert export`."""
    about = "round attention and MLP weights to int8 per output channel: slower than bf16 on a GPU"
    export.add_argument("--quantise", choices=("int8",), help=about)
    about = "with --quantise: text to compare the perplexity before and after on"
    export.add_argument("--data", nargs="+", metavar="TEXT", help=about)


def check_quantise(options: argparse.Namespace, tokenizer: Path | None) -> None:
    """Raise ConfigError for flags that contradict each other; DataError for a text that does not exist."""
    problems = list(_problems(options, tokenizer))
    if problems:
        raise ConfigError(problems, "the request")
    if options.data:
        # Imported here: other commands of `convert` need no numpy.
        from megalite.data.files.token_file import prepared_prefix
        from megalite.data.text.corpus import Corpus

        if prepared_prefix(options.data, "--data") is None:
            Corpus.open(options.data, pattern="*", key="--data")


def _problems(options: argparse.Namespace, tokenizer: Path | None) -> Iterator[Problem]:
    if options.data and options.quantise is None:
        yield Problem(
            "--data", "compares perplexities of --quantise, which is missing", "add --quantise int8"
        )
    if options.quantise and options.adapter:
        yield Problem("--quantise", "--adapter writes no weights to quantise", "leave out --adapter")
    if options.quantise and options.dtype == "float16":
        yield Problem("--dtype", "float16 has too small a range for scales", "use bfloat16 or float32")
    if options.data and tokenizer is None:
        yield Problem(
            "--data", "the checkpoint has no tokenizer to read text with", "name one with --tokenizer"
        )


def export_quantised(options: argparse.Namespace, export: "Callable[[Path], Export]") -> "Export":
    """Write the int8 folder, print sizes and perplexities, and return the plain export that was quantised."""
    from megalite.convert.huggingface.quantise import export_int8

    data = options.data
    done = export_int8(options.output, export, None if data is None else lambda at: _perplexity(at, data))
    before, after = done.sizes
    print(f"int8: {after:,} bytes of weights, {after / before:.1%} of {before:,} in {options.dtype}")
    report(int8_bytes=after, bytes_before=before, perplexities=done.perplexities)
    if done.perplexities is not None:
        perplexity, rounded = done.perplexities
        print(f"perplexity on {', '.join(data)}:")
        print(f"  {options.dtype:<9} {perplexity:.4f}")
        print(f"  {'int8':<9} {rounded:.4f}  ({rounded / perplexity - 1:+.3%})")
    return done.plain


def _perplexity(folder: Path, data: list[str]) -> float:
    """Return a folder's perplexity on text, in float32 and in windows of the model's longest sequence."""
    import torch

    from megalite.evaluate.documents import TextSource
    from megalite.evaluate.perplexity import TextEvaluation, evaluate_text
    from megalite.generation.loaded import load

    loaded = load(folder, dtype=torch.float32)
    window = loaded.config.longest_sequence
    return evaluate_text(loaded, TextEvaluation(TextSource(tuple(data)), window, window)).perplexity
