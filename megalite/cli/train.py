"""`megalite train`: the job, on ranks of its own or as a rank that a launcher started."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megalite.config.describe import describe_keys
from megalite.config.flags import split_overrides
from megalite.config.load import load_run
from megalite.config.schema import RunConfig
from megalite.errors import ConfigError
from megalite.launcher.environment import RankInfo, prepare_process, rank_info


def run(arguments: Sequence[str]) -> int:
    """Check the configuration, start the ranks or be one, train; the exit code of the job."""
    own, overrides = split_overrides(arguments)
    options = _parser(with_settings=bool({"-h", "--help"} & set(own))).parse_args(own)
    info = rank_info()
    try:
        loaded = load_run(options.run_file, overrides, world_size=info.world_size if info else None)
        config = loaded.config
    except ConfigError as error:
        if info is not None and info.rank > 0:
            return error.exit_code  # rank 0 says it for all
        raise
    if info is None or info.rank == 0:
        for note in loaded.notes:
            print(f"note: {note}")
    threads = prepare_process(config.training.threads, local_ranks=config.layout.world_size, info=info)

    # From here on torch may be imported: everything a user can get wrong in the file is known to be right.
    from megalite.train.job import RunFolder, prepare_inputs, train_rank
    from megalite.train.local import run_local_ranks, run_rank

    if config.zero_stage:
        _prepare_deepspeed(config, info)
    folder = RunFolder(Path(config.run.folder))
    if info is not None:
        return run_rank(train_rank, info, config.layout, folder.failures, arguments=(config, threads))
    folder.occupy().close()  # a folder that rank 0 could not use is better known before the text is prepared
    prepare_inputs(config, folder)
    preload = ["torch", "megalite.train.job", "torch.distributed.pipelining"]
    if config.zero_stage:
        preload.append("megalite.train.deepspeed")
    return run_local_ranks(
        train_rank, config.layout, folder.failures, arguments=(config, threads), preload=preload
    )


def _prepare_deepspeed(config: RunConfig, info: RankInfo | None) -> None:
    """Have this machine ready, or refuse, before the text is prepared and ranks wait for each other."""
    from megalite.train.deepspeed_ops import build_operator, require_precision

    require_precision(config.training.precision)
    if config.native_optimizer:
        silent = info is not None and info.local_rank > 0
        build_operator(config.deepspeed_json(), (lambda _: None) if silent else print)


def _parser(*, with_settings: bool) -> argparse.ArgumentParser:
    settings = describe_keys() if with_settings else ""
    parser = argparse.ArgumentParser(
        prog="megalite train",
        usage="megalite train [-h] RUN.toml [--section.key value ...]",
        description="Train the model that RUN.toml describes, on ranks of its own or as a rank of a launcher.",
        epilog=f"settings, in RUN.toml as [section] and key = value, or here as flags:\n\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    return parser
