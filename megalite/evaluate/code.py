"""pass@k of programs that complete given functions, by running their tests."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megalite.errors import DataError, listed
from megalite.evaluate.answers import Wanted, answers
from megalite.evaluate.questions import CodeProblem
from megalite.evaluate.rows import Row
from megalite.evaluate.sandbox import Limits, Outcome, run_program
from megalite.evaluate.scoring import Advance, ignore
from megalite.evaluate.statistics import Rate, pass_at_k
from megalite.evaluate.task_file import task_rows, tell_unread
from megalite.generation.loaded import LoadedModel
from megalite.generation.request import Sampling

# The completion of a function ends where the next statement of the module begins (Chen et al. 2021).
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")


@dataclass(frozen=True)
class CodeFigures:
    """pass_at: k -> the mean of pass@k over the problems. samples: programs of each problem, the fewest."""

    problems: int
    samples: int
    pass_at: Mapping[int, Rate]
    reasons: Mapping[str, int]


def generated(
    loaded: LoadedModel,
    problems: Sequence[CodeProblem],
    samples: int,
    tokens: int,
    sampling: Sampling,
    batch_size: int,
    advance: Advance = ignore,
) -> list[list[str]]:
    """Return `samples` completions of each problem, on every rank; batch_size: texts generated at a time.

    Collective over the world.
    """
    wanted = [
        Wanted(problem.prompt, STOPS, _drawn(sampling, number * samples + sample))
        for number, problem in enumerate(problems)
        for sample in range(samples)
    ]
    texts = answers(loaded, wanted, tokens, batch_size=batch_size, advance=advance)
    return [texts[start : start + samples] for start in range(0, len(texts), samples)]


def read_samples(
    path: Path, problems: Sequence[CodeProblem], note: Callable[[str], None] = lambda _: None
) -> list[list[str]]:
    """Return the completions that a .jsonl file holds of each problem: rows of task_id and completion.

    Raises DataError, with the line, for a row of no problem, and for a problem without a completion. note: called
    with a line about columns that are not read.
    """
    found: dict[str, list[str]] = {problem.name: [] for problem in problems}
    unread: Counter[str] = Counter()
    for values, where in task_rows(path, "--samples-file"):
        row = Row(values, where, {})
        name = row.text("task_id")
        if name not in found:
            raise row.wrong("task_id", f"{name!r} is no problem of the task", "remove the row")
        found[name].append(row.text("completion"))
        unread.update(row.unread)
    tell_unread(path, unread, note)
    missing = [name for name, completions in found.items() if not completions]
    if missing:
        raise DataError(
            f"--samples-file: {path} has no completion of {listed(missing)}; write one row for each, "
            "or score fewer problems with --limit"
        )
    return list(found.values())


def pass_rates(
    problems: Sequence[CodeProblem],
    completions: Sequence[Sequence[str]],
    ks: Sequence[int],
    limits: Limits,
) -> CodeFigures:
    """Run all programs, a few at a time, and return pass@k. Runs code: call it only if the user allows that."""
    programs = [
        (index, f"{problem.prompt}{completion}\n\n{problem.test}\n\ncheck({problem.entry_point})\n")
        for index, (problem, each) in enumerate(zip(problems, completions, strict=True))
        for completion in each
    ]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        outcomes = list(pool.map(lambda program: run_program(program[1], limits), programs))
    right = [0] * len(problems)
    for (index, _), outcome in zip(programs, outcomes, strict=True):
        right[index] += outcome.passed
    counts = [len(each) for each in completions]
    pass_at = {
        k: Rate.of([pass_at_k(count, passed, k) for count, passed in zip(counts, right, strict=True)])
        for k in ks
    }
    return CodeFigures(len(problems), min(counts), pass_at, _reasons(outcomes))


def _reasons(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return why programs failed, by the name of the error, the most frequent first."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        if not outcome.passed:
            name = outcome.reason.partition(":")[0]
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _drawn(sampling: Sampling, number: int) -> Sampling:
    """Return the settings with a seed of this sample's own."""
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed * 1_000_003 + number)
