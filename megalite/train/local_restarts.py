"""Restarts of the ranks on this machine, forked again from the process that has imported what they need. No torch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megalite.config.sections.schema import RunConfig
from megalite.errors import RankFailure
from megalite.launcher.hosts.restarts import Ended, run_with_restarts
from megalite.train.run_progress import attempt_end, has_own_state, published_step, records_mark


def run_again(config: RunConfig, ranks: Callable[[RunConfig], int], say: Callable[[str], None]) -> int:
    """Run all ranks to their end, again after a failure, up to launch.restarts times; return their exit code.

    ranks: runs them with a configuration. Raises the RankFailure after which there is no further start.
    """
    folder, failures = Path(config.run.folder), list[RankFailure]()
    # Another run's, or one that checkpoint.resume passes over: no restart goes on from it.
    older = published_step(folder)
    step: int | None = None

    def attempt(number: int) -> Ended:
        nonlocal step
        before, started = records_mark(folder), config
        if number and has_own_state(config, folder, older, step):
            started = config.resuming("auto")
        try:
            return Ended(ranks(started), "")
        except RankFailure as failure:
            failures.append(failure)
            ended = attempt_end(failure.exit_code, str(failure), None, folder, before)
            step = step if ended.step is None else ended.step
            return replace(ended, copied=config.checkpoint.in_memory_every > 0, final=failure.asked)

    ended = run_with_restarts(attempt, config.launch.restarts, say)
    if ended.failed or ended.cause:
        raise failures[-1]
    return ended.exit_code
