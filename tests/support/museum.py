"""The museum of bugs: tests that show that a failure which others have reported does not happen here.

`@exhibit(...)` makes a test an exhibit. It runs as before, and once more with the reported fault planted, when it has
to fail. `python -m docs.museum` writes docs/museum.md from the decorators, whose texts are therefore literals.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from docs.museum import report_links
from tests.support.planted import Planted
from tests.support.ranks import RankFailed, RanksHung

Test = TypeVar("Test", bound=Callable[..., Any])
ATTRIBUTE = "exhibits"


@dataclass(frozen=True)
class Exhibit:
    """A report and the fault that turns its test red."""

    report: str
    fault: Planted | str
    case: str
    costly: bool


def exhibit(
    report: str,
    *,
    subject: str,
    there: str,
    here: str,
    fault: Planted | str,
    also: tuple[str, ...] = (),
    case: str = "",
    costly: bool = False,
) -> Callable[[Test], Test]:
    """Make a test an exhibit; a test may be several.

    report, also: as "DeepSpeed#8224" or "DeepSpeed PR#8245"; docs/museum.py knows the repositories and the subjects.
    there, here: a line in plain words on what happened there, and on what the test shows to be true here.
    fault: planted in a second run of the test, which has to fail; or the name of a fault of tests/support, where the
    test plants it by itself (tests/parity/test_faults.py).
    case: a part of the id of the parameters that the second run has; empty: the first ones.
    costly: the second run is left to `tests/run.sh --all`.
    """
    assert there and here and subject
    report_links(report, *also)

    def mark(test: Test) -> Test:
        # The decorators of a test run from the last to the first.
        setattr(test, ATTRIBUTE, (Exhibit(report, fault, case, costly), *getattr(test, ATTRIBUTE, ())))
        return pytest.mark.exhibit(test)

    return mark


_PLANTED = pytest.StashKey[Exhibit]()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(obj: object) -> Generator[None, Any, Any]:
    """Add to the items of a test that is an exhibit the same test with the fault planted."""
    made = yield
    if made and isinstance(made, list) and hasattr(obj, ATTRIBUTE):
        return [*made, *_with_faults(made, getattr(obj, ATTRIBUTE))]
    return made


def _with_faults(items: list[pytest.Function], exhibits: tuple[Exhibit, ...]) -> Iterator[pytest.Function]:
    for shown in exhibits:
        ids = [item.callspec.id if hasattr(item, "callspec") else "" for item in items]
        matching = [item for item, name in zip(items, ids, strict=True) if shown.case in name]
        if not matching:
            raise pytest.UsageError(f"{items[0].nodeid}: {shown.report} names the case {shown.case}")
        if isinstance(shown.fault, str):
            continue
        item = matching[0]
        # pytest makes the id of an item of its original name and the id of its parameters.
        name = f"{item.originalname} with {shown.report}"
        copy = type(item).from_parent(
            item.parent,
            name=name + item.name.removeprefix(item.originalname),
            callspec=getattr(item, "callspec", None),
            callobj=item.obj,
            fixtureinfo=item._fixtureinfo,
            originalname=name,
        )
        if shown.costly:
            copy.add_marker(pytest.mark.extended)
        copy.stash[_PLANTED] = shown
        yield copy


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run a test with its fault planted, and require that it fails."""
    shown = pyfuncitem.stash.get(_PLANTED, None)
    if shown is None or isinstance(shown.fault, str):
        return (yield)
    with shown.fault.planted():
        try:
            yield
        except shown.fault.seen_as:
            return True
        except (RankFailed, RanksHung):
            raise  # also an AssertionError, but of a rank that crashed
        except (AssertionError, pytest.fail.Exception):
            return True
    pytest.fail(f"passes with the fault of {shown.report} planted: {shown.fault.target}", pytrace=False)
