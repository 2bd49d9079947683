"""Remedies for programs: what the problems of a broken rule say to set, applied as flags, makes the run load."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from megalite.errors import Problem
from tests.unit.config.rule_cases import Case
from tests.unit.config.runs import problems
from tests.unit.config.test_rules import CASES

ROUNDS = 4
"""A cure may meet the next rule: fewer stages, and then fewer micro batches."""
# Rules with a remedy that only a person can choose: a text, a file, a number of Megatron's, tables of a list.
CHOSEN_BY_A_PERSON = {
    "balanced_layers_know_the_vocabulary",
    "blend_names_each_set_once",
    "blend_weights_are_positive",
    "conversations_have_no_settings_of_text",
    "curriculum_has_a_weight_for_each_set",
    "curriculum_steps_rise",
    "every_stage_trains_something",
    "intervals_are_steps_or_epochs",
    "megatron_orders_have_a_number_of_samples",
    "megatron_validations_have_a_size",
    "offload_to_disk_has_its_folder",
    "patterns_choose_whole_parameters",
    "ranks_make_whole_replicas",
    "stop_after_is_a_duration",
    "streams_have_a_last_step",
    "streams_have_a_tokenizer",
    "text_is_given_once",
    "yarn_and_longrope_have_their_numbers",
    "zero_finds_every_group_on_every_stage",
}


def flags_of(found: Iterable[Problem]) -> list[str]:
    """Return the flags that set what the problems say."""
    settings = {key: value for problem in found for key, value in problem.set.items()}
    return [f"--{key}={'unset' if value is None else json.dumps(value)}" for key, value in settings.items()]


def without_set(case: Case, folder: Path, flags: Sequence[str] = ()) -> list[str]:
    found = problems(folder, case.changes, world_size=case.world_size, flags=flags)
    return [str(problem) for problem in found if not problem.set]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.said.split(";")[0][:60])
def test_what_a_remedy_sets_cures(case: Case, tmp_path: Path) -> None:
    flags: list[str] = []
    for _ in range(ROUNDS):
        found = problems(tmp_path, case.changes, world_size=case.world_size, flags=flags)
        if not found or case.rule in CHOSEN_BY_A_PERSON:
            return
        assert not without_set(case, tmp_path, flags)
        flags += flags_of(found)
    raise AssertionError([*map(str, found), flags])


def test_what_a_person_chooses_has_nothing_to_set(tmp_path: Path) -> None:
    assert {case.rule for case in CASES if without_set(case, tmp_path)} == CHOSEN_BY_A_PERSON
