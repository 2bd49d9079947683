"""A run that goes on from another program's checkpoint: the import to run first, and a run folder of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import main
from megalite.convert.adopt.account import Account, Outcome
from tests.unit.adopt.adopted import account_of, answer, write
from tests.unit.adopt.neox_facts import LOCAL, configuration

MEGATRON = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8"
MEGATRON += " --max-position-embeddings 8 --micro-batch-size 1 --train-iters 9 --lr 1e-3 --data-path text"
TRAINER = {"learning_rate": 1e-4, "per_device_train_batch_size": 1, "max_steps": 5}


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checkpoint(program: str, folder: str) -> None:
    """Write the names by which a program's checkpoint is known."""
    names = {
        "Megatron-LM": ("latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"),
        "GPT-NeoX": ("global_step10/layer_00-model_states.pt",),
        "Trainer": tuple(
            f"checkpoint-10/{name}" for name in ("trainer_state.json", "optimizer.pt", "config.json")
        ),
    }
    for name in names[program]:
        write(f"{folder}/{name}", "")
    if program == "GPT-NeoX":
        write(f"{folder}/latest", "global_step10")


def account_for(program: str, save: str | None, load: Any, **others: Any) -> Account:
    """The account of a run that writes `save` and begins from `load`."""
    if program == "Megatron-LM":
        words = [f"--save {save}" if save else "", f"--load {load}" if load else ""]
        words += [f"--{name.replace('_', '-')}" for name in others]
        return account_of(write("run.sh", f"{MEGATRON} {' '.join(words)}\n"))
    keys = ("output_dir", "resume_from_checkpoint") if program == "Trainer" else ("save", "load")
    table = {key: value for key, value in zip(keys, (save, load), strict=True) if value is not None}
    if program == "Trainer":
        return account_of(write("a.json", json.dumps({**TRAINER, **table, **others})))
    local = {key: value for key, value in LOCAL.items() if key not in keys}
    return account_of(write("a.yml", {**configuration("125M"), **local, **table, **others}))


def keys_of(program: str) -> tuple[str, str]:
    names = {"Megatron-LM": ("--save", "--load"), "Trainer": ("output_dir", "resume_from_checkpoint")}
    return names.get(program, ("save", "load"))


PROGRAMS = ("Megatron-LM", "GPT-NeoX", "Trainer")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_in_the_folder_of_their_checkpoints_gets_another_and_an_import(program: str) -> None:
    checkpoint(program, "theirs")
    account = account_for(program, "theirs", "auto" if program == "Trainer" else "theirs")
    save, load = keys_of(program)
    assert account.settings["run.folder"] == "theirs-megalite"
    assert "another program's checkpoints are there" in answer(account, save).reason
    assert answer(account, load).outcome is Outcome.CHANGED
    assert account.continues == ["megalite convert import theirs theirs-megalite"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_goes_on_in_another_folder_is_imported_there(program: str) -> None:
    checkpoint(program, "theirs")
    account = account_for(program, "ours", "theirs")
    assert account.settings["run.folder"] == "ours"
    assert not answer(account, keys_of(program)[1]).numbers
    assert account.continues == ["megalite convert import theirs ours"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_checkpoint_that_is_elsewhere_is_refused_with_its_import(program: str) -> None:
    account = account_for(program, "ours", "theirs")
    load = answer(account, keys_of(program)[1])
    assert load.numbers and "run megalite convert import theirs ours where the checkpoint is" in load.remedy
    assert account.continues == ["megalite convert import theirs ours"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_without_a_folder_to_write_gets_one(program: str) -> None:
    checkpoint(program, "theirs")
    account = account_for(program, None, "theirs")
    assert account.settings["run.folder"] == "runs/theirs"
    assert account.continues == ["megalite convert import theirs runs/theirs"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_new_run_beside_their_checkpoints_is_not_among_them(program: str) -> None:
    checkpoint(program, "theirs")
    checkpoint(program, "theirs-megalite")
    account = account_for(program, "theirs", None)
    assert account.settings["run.folder"] == "theirs-megalite-megalite"
    assert account.continues == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_folder_without_checkpoints_stays_the_runs_own(program: str) -> None:
    Path("own").mkdir()
    account = account_for(program, "own", "auto" if program == "Trainer" else "own")
    assert account.settings["run.folder"] == "own"
    assert account.continues == [] and not answer(account, keys_of(program)[1]).numbers


@pytest.mark.parametrize("program", ["Megatron-LM", "GPT-NeoX"])
@pytest.mark.parametrize("switch", ["finetune", "no_load_optim"])
def test_weights_alone_are_exported_instead(program: str, switch: str) -> None:
    checkpoint(program, "theirs")
    account = account_for(program, "ours", "theirs", **{switch: True})
    load = answer(account, keys_of(program)[1])
    assert load.numbers and "megalite convert export theirs FOLDER" in load.remedy
    assert account.continues == []


def test_axolotl_resumes_its_latest_checkpoint_by_itself() -> None:
    checkpoint("Trainer", "out")
    table = {
        "base_model": "m",
        "output_dir": "out",
        "learning_rate": 1e-4,
        "auto_resume_from_checkpoints": True,
    }
    account = account_of(write("a.yml", table))
    assert account.continues == ["megalite convert import out out-megalite"]
    elsewhere = account_of(write("a.yml", {**table, "resume_from_checkpoint": "b"}))
    assert elsewhere.continues == ["megalite convert import b out-megalite"]


def test_the_report_ends_with_the_import(capsys: pytest.CaptureFixture[str]) -> None:
    write("run.sh", f"{MEGATRON} --save ours --load their\\ folder --swiglu --moe-ffn-hidden-size 8\n")
    assert main(["adopt", "run.sh"]) == 2
    shown = capsys.readouterr().out
    assert shown.endswith("  megalite convert import 'their folder' ours\n")
    assert shown.index("\nrefused:\n") < shown.index("run first")
