"""The values of a sweep: how they are read, their grid, draws of them, and the names of the runs."""

import math

import pytest

from megalite.errors import ConfigError
from megalite.studies.values import drawn, grid, run_names, swept_settings

RATE = "optimizer.learning_rate"


def combinations(*texts: str) -> list[dict[str, str]]:
    return grid(swept_settings(texts, draws=False))


def test_the_grid_has_every_combination_and_lists_keep_their_commas() -> None:
    made = combinations(f"{RATE}=1e-4,3e-4", "optimizer.betas=[0.9,0.95],[0.9, 0.99]")
    betas = ["[0.9,0.95]", "[0.9, 0.99]"]
    assert made == [{RATE: rate, "optimizer.betas": beta} for rate in ("1e-4", "3e-4") for beta in betas]


def test_ranges_of_a_grid_are_spaced_by_their_scale() -> None:
    [rates] = swept_settings([f"{RATE}=log:1e-4:1e-2:3"], draws=False)
    assert rates.values == ("0.0001", "0.001", "0.01")
    [steps] = swept_settings(["training.steps=lin:10:25:4"], draws=False)
    assert steps.values == ("10", "15", "20", "25")


def test_draws_repeat_fill_their_ranges_and_a_larger_number_begins_alike() -> None:
    swept = swept_settings([f"{RATE}=log:1e-5:1e-1", "optimizer.name=adamw,lion"], draws=True)
    few, many = drawn(swept, 20, seed=3), drawn(swept, 200, seed=3)
    assert many[:20] == few and drawn(swept, 20, seed=4) != few
    logs = [math.log10(float(values[RATE])) for values in many]
    # Uniform in the logarithm: each of four decades has a quarter, and 200 draws leave none below a tenth.
    for decade in range(-5, -1):
        assert sum(decade <= log < decade + 1 for log in logs) > 20
    assert {values["optimizer.name"] for values in many} == {"adamw", "lion"}


def test_more_draws_than_combinations_are_refused_with_their_number() -> None:
    swept = swept_settings(["optimizer.name=adamw,lion"], draws=True)
    with pytest.raises(ConfigError, match="only 2 different combinations; use 2"):
        drawn(swept, 3, seed=0)


def test_names_say_the_values_and_stay_different() -> None:
    made = combinations(f"{RATE}=1e-4,3e-4", "run.seed=1")
    assert run_names(made) == ["learning_rate=1e-4,seed=1", "learning_rate=3e-4,seed=1"]
    lists = run_names(combinations('data.source=a/b,"a b",a-b'))
    assert len(set(lists)) == 3 and not any("/" in name or " " in name for name in lists)
    same_ends = run_names(combinations("data.shuffle=true,false", "run.seed=1", "training.steps=2"))
    assert len(set(same_ends)) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer.lerning_rate=1", "unknown key; did you mean learning_rate"),
        ("optimiser.name=lion", "there is no section optimiser"),
        (RATE, "has no values"),
        (f"{RATE}=1,,2", "empty value"),
        (f"{RATE}=1,1", "value twice"),
        (f"{RATE}=log:0:1:3", "no range"),
        (f"{RATE}=log:1e-2:1e-4:3", "no range"),
        (f"{RATE}=lin:a:b:3", "no range"),
        (f"{RATE}=log:1e-4:1e-2", "without a number of points"),
        ("run.folder=a,b", "cannot be swept"),
    ],
)
def test_a_wrong_argument_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        swept_settings([text], draws=False)


def test_all_wrong_arguments_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        swept_settings([f"{RATE}=1", f"{RATE}=2", "model.x=3"], draws=False)
