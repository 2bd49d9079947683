"""Fixtures and reporting for all tests."""

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when torch is first imported. Tensors here are tiny: a second thread costs more than it brings, and where the
# kernel puts both on one core (some virtual machines do) they wait for each other ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when huggingface_hub is first imported: no test asks the Hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.support.ranks import RankPool

SELECTED_BY_MARKER = ("gpu", "slow")
not_selected: Counter[str] = Counter()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of worker processes: `ranks.run(function, world_size=4, **arguments)`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def devices() -> Iterator[RankPool]:
    """A pool as `ranks`, whose workers see the stand-in accelerator; ended with the module, to free their memory."""
    pool = RankPool("standin")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real corpora and models beside the repository; tests that ask for them skip without."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the repository")
    return folder


@pytest.fixture(autouse=True)
def one_seed() -> None:
    """Every test starts from the same random streams."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        not_selected.update(marker for marker in SELECTED_BY_MARKER if item.get_closest_marker(marker))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for marker, count in sorted(not_selected.items()):
        terminalreporter.write_line(f"not run: {count} marked {marker} (run them with: pytest -m {marker})")
