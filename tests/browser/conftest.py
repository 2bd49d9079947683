"""One Chromium for all tests of web pages, and a run whose report they look at."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.cli import main
from tests.support.browser import Browser, chromium
from tests.support.jobs import training_here
from tests.support.tiny_run import SETTINGS, write_token_files


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture(scope="session")
def trained(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this process with validations, a checkpoint, a trace and norms of layers; not without a browser."""
    folder = tmp_path_factory.mktemp("trained")
    write_token_files(folder)
    text = f'[data]\nsource = "{folder / "train"}"\nvalidation = "{folder / "held"}"\n'
    (folder / "run.toml").write_text(f'{text}[run]\nfolder = "{folder / "first"}"\n')
    changes = {"training.steps": 8, "validation.every": 4, "checkpoint.every": 4, "monitor.layers_every": 2}
    flags = [f"--{name}={value}" for name, value in {**SETTINGS, **changes}.items()]
    with training_here():
        assert main(["train", str(folder / "run.toml"), *flags, "--monitor.trace_steps=[6]"]) == 0
    return folder / "first"
