"""Fixtures and reporting for all tests."""

import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from operator import itemgetter
from pathlib import Path

import hypothesis
import pytest

# Read when torch is first imported. Tensors here are tiny: a second thread costs more than it brings, and where the
# kernel puts both on one core (some virtual machines do) they wait for each other ten times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when huggingface_hub is first imported: no test asks the Hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell's background jobs inherit an ignored SIGINT, those of nohup SIGHUP, and so would the jobs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

from tests.support.museum import pytest_pycollect_makeitem, pytest_pyfunc_call  # noqa: F401
from tests.support.ranks import RankPool

# A busy machine is no failure.
hypothesis.settings.register_profile("megalite", deadline=None)
hypothesis.settings.load_profile("megalite")

# Marker -> how to run what it keeps out.
HOW_TO_RUN = {
    "extended": "bash tests/run.sh --all",
    "slow": "bash tests/run.sh -m slow",
    "gpu": "bash tests/run.sh -m gpu",
}
not_selected: Counter[str] = Counter()
seconds_of_file: defaultdict[str, float] = defaultdict(float)


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


def pytest_sessionfinish() -> None:
    # Otherwise nobody waits for the server from which ranks are forked, and the time of all ranks is in no sum.
    forkserver._forkserver._stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest-files", type=int, default=0, metavar="N", help="name the N slowest files")


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marker = next((each for each in reversed(HOW_TO_RUN) if item.get_closest_marker(each)), None)
        not_selected.update([marker] if marker else [])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds_of_file[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.getoption("slowest_files"):
        slowest = sorted(seconds_of_file.items(), key=itemgetter(1), reverse=True)[:count]
        terminalreporter.section("slowest files", "-")
        for file, seconds in slowest:
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
    for marker, command in HOW_TO_RUN.items():
        if count := not_selected[marker]:
            terminalreporter.write_line(f"not run: {count} tests marked {marker} ({command})")
