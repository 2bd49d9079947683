"""megalite train: train a model, starting its own ranks or as one rank of a launcher."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megalite.config.describe import describe_keys
from megalite.config.flags import split_overrides
from megalite.config.load import load_run
from megalite.errors import ConfigError
from megalite.launcher.detect import rank_info
from megalite.train.run import Trainer


def run(arguments: Sequence[str]) -> int:
    """Check the configuration, start the ranks or act as one, train; return the job's exit code."""
    own, overrides = split_overrides(arguments)
    options = _parser(with_settings=bool({"-h", "--help"} & set(own))).parse_args(own)
    info = rank_info()
    try:
        loaded = load_run(options.run_file, overrides, world_size=info.world_size if info else None)
        if info is None or info.rank == 0:
            for note in loaded.notes:
                print(f"note: {note}")
        return Trainer(loaded.config).run(str(options.run_file))
    except ConfigError as error:
        if info is not None and info.rank > 0:
            return error.exit_code  # rank 0 prints the same error
        raise


def _parser(*, with_settings: bool) -> argparse.ArgumentParser:
    settings = describe_keys() if with_settings else ""
    parser = argparse.ArgumentParser(
        prog="megalite train",
        usage="megalite train [-h] RUN.toml [--section.key value ...]",
        description="Train the model that RUN.toml describes, starting its own ranks or as one rank of a launcher.",
        epilog=f"settings, as [section] and key = value in RUN.toml, or as flags here:\n\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    return parser
