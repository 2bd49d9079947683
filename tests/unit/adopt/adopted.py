"""Write files of another program, adopt them, and show the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.cli import main
from megalite.config.load import load_run
from megalite.config.sections.schema import RunConfig
from megalite.convert.adopt.account import Account, KeyAnswer
from megalite.convert.adopt.sources import read_source
from megalite.convert.adopt.systems import adopt

LLAMA = '{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, '
LLAMA += '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, '
LLAMA += '"max_position_embeddings": 131072, "rms_norm_eps": 1e-5}'


def write(name: str, table: Mapping[str, Any] | str) -> Path:
    """Write a file into the working directory: a table as YAML, a text as it is."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table if isinstance(table, str) else yaml.safe_dump(dict(table)))
    return path


def model_folder(name: str) -> None:
    """Write the config.json of a small Llama as a folder of weights has it."""
    write(f"{name}/config.json", LLAMA)


def account_of(*paths: Path) -> Account:
    return adopt(list(paths))


def answer(account: Account, key: str) -> KeyAnswer:
    """Return the one answer to a key."""
    (only,) = [each for each in account.answers if each.key == key]
    return only


def refused(account: Account) -> set[str]:
    return {each.key for each in account.answers if each.outcome.value == "refused"}


def unanswered(account: Account, *paths: Path) -> set[str]:
    """Return the keys of the files, of all levels that are tables of DeepSpeed too, without an answer."""
    answers = {each.key for each in account.answers}
    keys = {key for path in paths for key in read_source(path).mapping()}
    return {
        key for key in keys if key not in answers and not any(each.startswith(f"{key}.") for each in answers)
    }


def adopted_run(*paths: Path) -> RunConfig:
    """Adopt files without a refused key that changes the numbers, and load the run file as `config show` does."""
    assert main(["adopt", *map(str, paths), "--output", "run.toml", "--overwrite"]) == 0
    return load_run("run.toml", places=True).config


def adopt_and_show(*paths: Path) -> tuple[int, int]:
    """Return the exit codes of `megalite adopt`, and of `megalite config show` for the run file that it writes.

    A run file that is refused for its numbers is written with --partial.
    """
    names = [str(path) for path in paths]
    adopted = main(["adopt", *names, "--output", "run.toml", "--overwrite"])
    if adopted:
        main(["adopt", *names, "--output", "run.toml", "--overwrite", "--partial"])
    return adopted, main(["config", "show", "run.toml"])


def assert_every_key_is_answered(*paths: Path, changing: set[str], shown: bool = True) -> Account:
    """Adopt files: each key has an answer, those refused that change the numbers are `changing`.

    shown: whether `megalite config show` reads the run file. Returns the account.
    """
    account = account_of(*paths)
    assert unanswered(account, *paths) == set()
    assert {answer.key for answer in account.answers if answer.numbers} == changing
    if shown:
        assert adopt_and_show(*paths) == (2 if changing else 0, 0)
    return account
