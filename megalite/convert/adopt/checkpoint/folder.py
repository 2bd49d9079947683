"""A checkpoint folder that carries its run's arguments: find which program's it is, and account for them.

mp_rank_00/model_optim_rng.pt, common.pt         Megatron-LM: args
mp_rank_00_model_states.pt                       DeepSpeed's pipeline engine: args of Megatron-DeepSpeed
configs/*.yml                                    the same of GPT-NeoX
training_args.bin, trainer_state.json            Hugging Face's Trainer
mp_rank_00_model_states.pt                       DeepSpeed's engine: ds_config, its JSON, alone

Finding imports no torch; reading does.
"""

import shlex
from dataclasses import replace
from pathlib import Path

from megalite.convert.adopt.account import Account, Outcome
from megalite.convert.adopt.checkpoint.namespace import group_idle
from megalite.convert.adopt.continued import own_folder
from megalite.convert.deepspeed.folder import find_engine
from megalite.convert.deepspeed.pipeline_folder import pipeline_place
from megalite.convert.megatron.folder import megatron_place
from megalite.convert.trainer.folder import find_arguments
from megalite.errors import ConfigError, Problem

_PLACES = (
    *("save", "load", "finetune", "pretrained_checkpoint", "output_dir", "resume_from_checkpoint"),
    *("overwrite_output_dir", "no_load_optim", "no_load_rng"),
)
"""Keys on where checkpoints are written and read, which the import of this one answers."""


def adopt_folder(folder: Path) -> Account:
    """Return the account of a checkpoint folder's arguments, with the commands that continue its run.

    Raises ConfigError for a folder of no known program, and CheckpointError for one whose files cannot be read.
    """
    name, place = _find(folder)
    from megalite.convert.adopt.checkpoint.read import READERS

    found = READERS[name](place)
    account, run_folder = found.account, own_folder(f"runs/{folder.resolve().name or 'adopted'}")
    account.answers = [
        replace(
            answer,
            outcome=Outcome.NO_EFFECT,
            settings={},
            reason="the run goes on in run.folder, from the imported checkpoint",
            remedy="",
            numbers=False,
        )
        if answer.key.replace("-", "_") in _PLACES
        else answer
        for answer in account.answers
    ]
    group_idle(account)
    for setting, value in found.settings.items():
        account.default(setting, value, f"as {folder.name} has it")
    account.settings.pop("checkpoint.resume", None)
    account.settings["run.folder"] = run_folder
    importing = f"megalite convert import {shlex.quote(str(folder))} {shlex.quote(run_folder)}{found.flags}"
    account.continues = [importing, "megalite train RUN.toml"]
    return account


def _find(folder: Path) -> tuple[str, Path]:
    """Return the program of a folder, as a key of READERS, and the place of its arguments."""
    finders = {
        "pipeline engine": pipeline_place,
        "Trainer": find_arguments,
        "engine": find_engine,
        "Megatron-LM": megatron_place,
    }
    for name, find in finders.items():
        if (place := find(folder)) is not None:
            return name, place
    message = "is no checkpoint folder of Megatron-LM, GPT-NeoX, DeepSpeed or Hugging Face's Trainer"
    remedy = "name such a folder, or the files of another program in it"
    raise ConfigError([Problem(str(folder), message, remedy)], "megalite adopt")
