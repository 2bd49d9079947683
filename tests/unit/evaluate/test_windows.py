"""Rolling windows score each token once, with the context that they promise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.evaluate.windows import Window, rolling_windows

START = 99


def read(windows: list[Window]) -> list[tuple[list[int], list[int]]]:
    return [(window.inputs.tolist(), window.targets.tolist()) for window in windows]


def test_windows_are_those_of_lm_eval() -> None:
    """The example in lm_eval's documentation of loglikelihood_rolling; the last pair has full context."""
    found = rolling_windows(np.arange(10), length=4, stride=4, prefix=START)
    assert read(list(found)) == [
        ([START, 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]


@given(st.integers(0, 40), st.integers(1, 9), st.data(), st.booleans())
def test_each_token_is_scored_once_after_the_tokens_before_it(
    tokens: int, length: int, data: st.DataObject, starts: bool
) -> None:
    stride = data.draw(st.integers(1, length))
    ids = np.arange(tokens)
    windows = list(rolling_windows(ids, length=length, stride=stride, prefix=START if starts else None))
    scored = [each for window in windows for each in window.targets.tolist()]
    assert scored == list(range(0 if starts else 1, tokens))
    for number, window in enumerate(windows):
        whole = [*window.inputs.tolist(), window.targets.tolist()[-1]]
        assert whole[-len(window.targets) :] == window.targets.tolist()
        assert whole[1:] == list(range(whole[1], whole[1] + len(whole) - 1))
        assert len(window.inputs) <= length and (number == 0 or len(window.inputs) == length)
        # All but the first window leave the promised context in front of what they score.
        assert number == 0 or len(window.inputs) - len(window.targets) >= length - stride


def test_windows_without_a_token_that_counts_are_left_out() -> None:
    counted = np.array([False] * 5 + [True, False, True, False, False])
    found = list(rolling_windows(np.arange(10), length=3, stride=3, prefix=START, counted=counted))
    assert [window.targets.tolist() for window in found] == [[3, 4, 5], [6, 7, 8]]
    assert [window.counted.tolist() for window in found] == [[False, False, True], [False, True, False]]


@pytest.mark.parametrize("ids", [[], [5]])
def test_nothing_to_predict_gives_no_window(ids: list[int]) -> None:
    assert not list(rolling_windows(np.array(ids), length=3, stride=3, prefix=None))
