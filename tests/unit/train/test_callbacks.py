"""Callbacks: what they return, and what is said of one that raises."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalite.errors import ConfigError, DataError, TrainingError
from megalite.launcher.control.failures import FailureFolder
from megalite.topology.axes import Layout
from megalite.train.callbacks import ActiveRun, Callback, Callbacks, named_callbacks

RUN = cast(ActiveRun, SimpleNamespace(state=SimpleNamespace(step=3)))
REPORT = cast(Any, SimpleNamespace(step=3, loss=2.0))


class Gives(Callback):
    def __init__(self, **metrics: Any):
        self._metrics = metrics

    def on_step_end(self, run: ActiveRun, report: Any) -> Any:
        return self._metrics


class Raises(Callback):
    def __init__(self, error: Exception):
        self._error = error

    def on_step_end(self, run: ActiveRun, report: Any) -> None:
        raise self._error


def step_end(*callbacks: Callback) -> dict[str, float]:
    return Callbacks(callbacks, RUN).step_end(REPORT)


def test_metrics_of_all_are_joined() -> None:
    assert step_end(Gives(a=1), Callback(), Gives(b=True)) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("callbacks", [(Gives(loss=1),), (Gives(a=1), Gives(a=2)), (Gives(validation_x=1),)])
def test_a_metric_that_there_is_already_is_refused(callbacks: tuple[Callback, ...]) -> None:
    with pytest.raises(
        TrainingError, match=r"Gives\.on_step_end returned the metric \w+, which exists already"
    ):
        step_end(*callbacks)


@pytest.mark.parametrize("value", ["much", [1.0], None, torch.ones(2)])
def test_a_metric_that_is_no_number_is_refused(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(
        TrainingError, match=rf"Gives\.on_step_end returned a value of type {kind} as the metric a"
    ):
        step_end(Gives(a=value))


@pytest.mark.parametrize("value", ["done", 1.5, [("a", 1)], False])
def test_a_hook_that_returns_no_dict_is_told_what_to_return(value: Any) -> None:
    class Bad(Callback):
        def on_step_end(self, run: ActiveRun, report: Any) -> Any:
            return value

    told = f"the callback Bad.on_step_end returned a value of type {type(value).__name__}; return a dict of numbers"
    with pytest.raises(TrainingError, match=told):
        step_end(Bad())


def test_an_exception_is_told_with_hook_place_and_step() -> None:
    with pytest.raises(TrainingError) as raised:
        step_end(Raises(KeyError("missing")))
    assert str(raised.value).startswith("the callback Raises.on_step_end raised KeyError: 'missing' (")
    assert "test_callbacks.py:" in str(raised.value) and "after step 3)" in str(raised.value)


def test_an_error_written_for_the_user_stays_as_it_is() -> None:
    with pytest.raises(DataError, match=r"^no text$"):
        step_end(Raises(DataError("no text")))


def test_a_connection_of_the_users_is_not_taken_for_that_of_a_rank(tmp_path: Any) -> None:
    folder = FailureFolder(tmp_path, Layout(data=2), "job")
    info = cast(Any, SimpleNamespace(rank=1, node="here"))
    with pytest.raises(TrainingError) as raised:
        step_end(Raises(ConnectionRefusedError("the dashboard is down")))
    report = folder.of_exception(info, raised.value)
    assert not report.secondary and "the dashboard is down" in report.headline
    assert "ConnectionRefusedError" in report.traceback


def test_callbacks_are_made_by_their_names_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the current folder, as a user writes one beside RUN.toml."""
    (tmp_path / "hooks_of_this_test.py").write_text(
        "import megalite\nclass Norm(megalite.Callback): pass\nclass Needs(Norm):\n    def __init__(self, x): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    [made] = named_callbacks(["hooks_of_this_test:Norm"])
    assert type(made).__name__ == "Norm" and named_callbacks([]) == ()
    wrong = [
        "hooks_of_this_test:Absent",
        "nowhere_at_all:Norm",
        "pathlib:Path",
        "Norm",
        "hooks_of_this_test:Needs",
    ]
    with pytest.raises(ConfigError) as error:
        named_callbacks(wrong)
    assert [problem.message.split(" cannot")[0] for problem in error.value.problems] == [
        f'"{name}"' for name in wrong
    ]
    assert '"Norm" cannot be made: it is not of the form MODULE:CLASS; write' in str(error.value)
    assert '"pathlib:Path" cannot be made: Path is no class derived from megalite.Callback;' in str(
        error.value
    )
