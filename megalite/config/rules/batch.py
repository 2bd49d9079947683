"""Data-parallel size and batch sizes: compute the missing ones, or say what is wrong with them."""

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.config.sections.checked import CheckedRun, Unknown
from megalite.config.sections.training_section import LEAST_MICRO_BATCH, BatchPlan
from megalite.errors import Problem
from megalite.topology.axes import Layout

_GLOBAL, _SIZE, _COUNT = "training.global_batch_size", "training.micro_batch_size", "training.micro_batches"


def data_size(run: CheckedRun) -> int:
    """Return the number of data-parallel replicas. Raises Unknown if the layout does not fit the started ranks."""
    replica = Layout.of(run.parallel).replica_size
    if run.parallel.data == "auto":
        if run.world_size is None:
            return 1
        if run.world_size % replica:
            raise Unknown("parallel.data")
        return run.world_size // replica
    if run.world_size is not None and run.world_size != replica * run.parallel.data:
        raise Unknown("parallel.data")
    return run.parallel.data


def most_ranks(run: CheckedRun, slots: int) -> int | None:
    """Return the most ranks that parallel.data = "auto" can use of `slots`; None where the layout alone decides."""
    try:
        replica = Layout.of(run.parallel).replica_size
        return slots // replica * replica or None if run.parallel.data == "auto" else None
    except Unknown:
        return None


@dataclass(frozen=True)
class BatchProblem(Exception):
    """The batch sizes contradict each other, or too few are set."""

    problem: Problem


def plan_batch(run: CheckedRun) -> BatchPlan:
    """Solve global_batch_size = micro_batch_size * micro_batches * data for the one of the first three not set.

    Raises BatchProblem; Unknown if one of the settings is invalid.
    """
    training, data = run.training, data_size(run)
    size, count, total = training.micro_batch_size, training.micro_batches, training.global_batch_size
    if size == "auto":
        least = LEAST_MICRO_BATCH[run.data.kind]
        if total is None:
            message = f'{_SIZE} = "auto" depends on the memory, on which the global batch must not depend'
            raise BatchProblem(Problem.reset(_GLOBAL, message, "set it", least * (count or 1) * data))
        # Two numbers leave nothing to choose.
        size = least if count is None else None
    if size is not None and count is not None:
        if total is None or total == size * count * data:
            return BatchPlan(size, count, size * count * data, data)
        raise BatchProblem(_contradiction(run, total, size, count, data))
    if total is None or (size is None and count is None):
        if "deepspeed" in run.incomplete:
            raise Unknown("the batch sizes of a JSON that cannot be read")
        raise BatchProblem(_too_few(run))
    known_name, known = (_SIZE, size) if size is not None else (_COUNT, count)
    assert known is not None
    if total % (known * data):
        raise BatchProblem(_indivisible(run, total, known_name, known, data))
    other = total // (known * data)
    return BatchPlan(known, other, total, data) if size is not None else BatchPlan(other, known, total, data)


def _contradiction(run: CheckedRun, total: int, size: int, count: int, data: int) -> Problem:
    message = (
        f"{total} {run.source(_GLOBAL)} is not micro_batch_size {size} {run.source(_SIZE)} "
        f"* micro_batches {count} {run.source(_COUNT)} * {_data(run, data)} = {size * count * data}"
    )
    fitting = [f"global_batch_size {size * count * data}"]
    if total % (size * data) == 0:
        fitting.append(f"micro_batches {total // (size * data)}")
    if total % (count * data) == 0:
        fitting.append(f"micro_batch_size {total // (count * data)}")
    if total % (size * count) == 0:
        ranks = Layout.of(run.parallel, total // (size * count)).world_size
        fitting.append(f"data {total // (size * count)} ({_ranks(ranks)})")
    return Problem.reset(_GLOBAL, message, f"use {' or '.join(fitting)}", size * count * data)


def _indivisible(run: CheckedRun, total: int, name: str, known: int, data: int) -> Problem:
    share = known * data
    short = name.removeprefix("training.")
    message = (
        f"{total} {run.source(_GLOBAL)} is not a multiple of {short} {known} {run.source(name)} "
        f"* {_data(run, data)} = {share}"
    )
    nearest = [each for each in (total // share * share, (total // share + 1) * share) if each]
    return Problem.reset(_GLOBAL, message, f"use {' or '.join(map(str, nearest))}", nearest[0])


def _too_few(run: CheckedRun) -> Problem:
    values = {key: getattr(run.training, key.removeprefix("training.")) for key in (_GLOBAL, _SIZE, _COUNT)}
    known = [f"{key} = {value} {run.source(key)}" for key, value in values.items() if value is not None]
    others = [key for key, value in values.items() if value is None]
    message = f"{known[0]} alone does not determine the batch" if known else "the batch size is not set"
    ones = {key: 1 for key in (_SIZE, _COUNT) if key in others and (key == _SIZE or _GLOBAL in others)}
    return Problem(others[0], message, f"set {'one' if known else 'two'} of {', '.join(others)}", ones)


def _data(run: CheckedRun, data: int) -> str:
    """Return the data-parallel size and its origin: "data 2 (8 ranks / tensor 2 / pipeline 2)"."""
    if run.parallel.data != "auto":
        return f"data {data} {run.source('parallel.data')}"
    if run.world_size is None:
        return f"data {data} (default)"
    sizes = Layout.of(run.parallel).named_sizes
    cut = "".join(f" / {name} {size}" for name, size in sizes.items() if size > 1)
    return f"data {data} ({_ranks(run.world_size)}{cut})"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def memory_limits_a_choice(run: CheckedRun) -> Iterator[Problem]:
    size, count = run.training.micro_batch_size, run.training.micro_batches
    if run.training.memory_limit is not None and (size != "auto" or count is not None):
        message = 'has an effect only on training.micro_batch_size = "auto" without training.micro_batches'
        yield Problem.reset("training.memory_limit", message, "delete it")


def batch_numbers_agree(run: CheckedRun) -> Iterator[Problem]:
    try:
        plan_batch(run)
    except BatchProblem as found:
        yield found.problem
