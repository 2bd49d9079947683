"""All rules over several settings or the number of ranks; each is a function that yields its problems."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megalite.config.rules import (
    adapter,
    batch,
    computation,
    context,
    data,
    expert_parallel,
    experts,
    latent,
    layout,
    megatron_order,
    model,
    monitor,
    optimizer,
    pipeline,
    places,
    preference,
    streaming,
    training,
    validation,
)
from megalite.config.sections.checked import CheckedRun, Unknown
from megalite.errors import Problem


def _functions_that_yield(kind: type, *modules: ModuleType) -> tuple[Any, ...]:
    """Return the public functions of modules from a run to an iterator over `kind`, in the order of their lines."""
    return tuple(
        function
        for module in modules
        for name, function in vars(module).items()
        if not name.startswith("_")
        and getattr(function, "__module__", "") == module.__name__
        and getattr(function, "__annotations__", {}) == {"run": CheckedRun, "return": Iterator[kind]}  # type: ignore[valid-type]
    )


_SUBJECTS = (
    layout,
    expert_parallel,
    model,
    experts,
    latent,
    adapter,
    pipeline,
    batch,
    computation,
    context,
    training,
    optimizer,
    data,
    streaming,
    megatron_order,
)
RULES = _functions_that_yield(Problem, *_SUBJECTS, preference, validation, monitor)
_PLACE_RULES = _functions_that_yield(Problem, places)
_NOTES = _functions_that_yield(str, computation, context, experts, optimizer, adapter, monitor)

_LAYOUT_RULES = _functions_that_yield(
    Problem, layout, expert_parallel, pipeline, batch, computation, context, experts, optimizer
)


def layout_problems(run: CheckedRun) -> Iterator[Problem]:
    """Yield the problems of the rules that depend on how a legal model is laid out, for the search of layouts."""
    for rule in _LAYOUT_RULES:
        try:
            yield from rule(run)
        except Unknown:
            continue


def problems_of(run: CheckedRun, *, places: bool = False) -> list[Problem]:
    """Return the problems of all rules, skipping each rule that reads an invalid or missing setting.

    places: apply the rules over the files and folders of this machine too.
    """
    problems: list[Problem] = []
    for rule in (*RULES, *(_PLACE_RULES if places else ())):
        try:
            problems += rule(run)
        except Unknown:
            continue
    return problems


def notes_of(run: CheckedRun) -> list[str]:
    """Return messages about costs and settings without effect, for a run without problems."""
    return [note for notes in _NOTES for note in notes(run)]
