"""The pool of a study's runs: a signal that a library's thread takes stops them all the same."""

import signal
import threading
from pathlib import Path

from megalite.studies.run_pool import SAVED_CODES, EndedRun, RunPool
from megalite.studies.study_runs import StudySource, checked_runs
from tests.support.studies import write_study


def test_a_signal_that_another_thread_takes_stops_the_runs(tmp_path: Path) -> None:
    run_file = write_study(tmp_path)
    runs = checked_runs(StudySource(run_file, ()), tmp_path / "study", {"first": {}, "second": {}}, jobs=1)
    ended: list[EndedRun] = []
    handler = signal.getsignal(signal.SIGINT)

    def say(text: str) -> None:
        if "starts" in text:
            take = lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # noqa: E731
            threading.Thread(target=take).start()

    pool = RunPool(run_file, jobs=1, say=say)
    pool.train(runs, ended.append)
    assert pool.stopped_by == signal.SIGINT
    assert [each.run.name for each in ended] == ["first"] and ended[0].exit_code in SAVED_CODES
    assert signal.getsignal(signal.SIGINT) == handler
