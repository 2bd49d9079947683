"""The keys by which other programs report their metrics become monitor.report_to and the names of the run."""

from collections.abc import Mapping
from typing import Any

import pytest

from megalite.convert.adopt.account import Account, Outcome
from megalite.convert.adopt.keyed import axolotl, trainer
from megalite.convert.adopt.megatron import rules as megatron
from megalite.convert.adopt.neox import system as neox
from megalite.convert.adopt.rules import KeyRule, Reading, apply_rules

CASES: dict[str, tuple[Mapping[str, KeyRule], dict[str, Any], dict[str, Any]]] = {
    "axolotl": (
        axolotl.RULES,
        {"use_tensorboard": True, "wandb_project": "books", "wandb_name": "a", "wandb_entity": None},
        {"report_to": ["tensorboard", "wandb"], "project": "books", "run_name": "a"},
    ),
    "axolotl, switched off": (
        axolotl.RULES,
        {"use_wandb": False, "wandb_project": "books", "use_mlflow": True},
        {"report_to": ["mlflow"], "project": "books"},
    ),
    "GPT-NeoX": (
        neox.RULES,
        {
            "use_wandb": True,
            "wandb_project": "neox",
            "wandb_group": "g",
            "wandb_team": "t",
            "tensorboard_dir": "d",
        },
        {"report_to": ["tensorboard", "wandb"], "project": "neox", "group": "g", "entity": "t"},
    ),
    "Megatron-LM": (
        megatron.RULES,
        {"tensorboard-dir": "logs", "wandb-project": "p", "wandb-exp-name": "first"},
        {"report_to": ["tensorboard", "wandb"], "project": "p", "run_name": "first"},
    ),
    "Trainer": (
        trainer.RULES,
        {"report_to": ["wandb", "comet_ml"], "run_name": "first"},
        {"report_to": ["wandb"], "run_name": "first"},
    ),
    "Trainer without": (trainer.RULES, {"report_to": "none"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_keys_of_sinks_become_the_list_and_the_names(case: str) -> None:
    rules, keys, expected = CASES[case]
    account = Account(case)
    apply_rules(Reading(account, keys), rules)
    assert account.settings == {f"monitor.{key}": value for key, value in expected.items()}


def test_a_service_without_a_sink_is_named() -> None:
    account = Account("Trainer")
    apply_rules(Reading(account, {"report_to": ["wandb", "comet_ml"]}), trainer.RULES)
    [changed] = account.with_outcome(Outcome.CHANGED)
    assert changed.reason == "megalite does not report to comet_ml"


def test_two_names_of_a_run_are_refused_without_a_change_of_its_numbers() -> None:
    account = Account("axolotl")
    keys = {"wandb_project": "books", "use_mlflow": True, "mlflow_experiment_name": "films"}
    apply_rules(Reading(account, keys), axolotl.RULES)
    [refused] = account.with_outcome(Outcome.REFUSED)
    assert "monitor.project" in refused.reason and not account.changes_numbers
