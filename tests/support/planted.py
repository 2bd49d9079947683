"""The fault of an exhibit of the museum: a name of the production code is replaced for as long as a test runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any
from unittest import mock

# Planted in this process; RankPool plants them in the ranks of a test too.
PLANTED: "list[Planted]" = []


@dataclass(frozen=True)
class Planted:
    """A fault: `target` is replaced by `replace(original)`.

    target: "package.module:name" or "package.module:Class.name", where the code that is tried looks it up.
    replace: stands at a module's top level if the test has ranks, which get it by its name.
    seen_as: further exceptions that show the fault, where it is a crash; a failed assertion always does.
    """

    target: str
    replace: Callable[[Any], Any]
    seen_as: tuple[type[BaseException], ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Run with the fault, here and in the ranks that are called meanwhile."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, import_module(module))
        # The attribute as it stands in a class, so that a static method stays one.
        original = vars(owner).get(name, getattr(owner, name))
        with mock.patch.object(owner, name, self.replace(original)):
            PLANTED.append(self)
            try:
                yield
            finally:
                PLANTED.remove(self)


def without_rule(name: str) -> Planted:
    """Return the fault of a check of a run's settings that is missing."""
    rules = "megalite.config.rules.every:RULES"
    return Planted(rules, lambda every: [rule for rule in every if rule.__name__ != name])


def instead(other: Any) -> Callable[[Any], Any]:
    """Return a `replace` that puts `other` in place of the original."""
    return lambda _: other
