"""megalite train, as far as it goes before the ranks start."""

from pathlib import Path

import pytest

from megalite.cli import train
from megalite.cli.first_run import starter_of
from megalite.errors import ConfigError
from megalite.ops import extension
from tests.unit.config.runs import changed, write_run


class Started(Exception):
    """The point at which the process would be prepared for training."""


@pytest.fixture(autouse=True)
def started_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def start_by_launcher(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, local_size: int) -> None:
    """Set the variables that a launcher gives to one of its ranks."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": local_size}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("rank", "told"), [(None, 1), (0, 1), (1, 0)])
def test_what_the_settings_cost_is_told_once_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int | None,
    told: int,
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Started

    if rank is not None:
        start_by_launcher(monkeypatch, rank, world_size=2, local_size=2)
    monkeypatch.setattr(train.Trainer, "run", stop)
    path = write_run(tmp_path, changed({"model.attention_dropout": 0.1, "model.kernels": "reference"}))
    with pytest.raises(Started):
        train.run([str(path)])
    assert capsys.readouterr().out.count("note: model.attention_dropout = 0.1 with") == told


def test_fp16_under_zero_is_refused_before_the_text_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr("megalite.train.run.prepare_process", lambda *_, **__: 1)
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    settings = {"deepspeed.zero_optimization.stage": 1, "training.precision": "fp16"}
    path = write_run(tmp_path, changed({**settings, "run.folder": str(tmp_path / "run")}))
    with pytest.raises(ConfigError, match=r'training.precision: "fp16" with ZeRO needs a GPU.*use "bf16"'):
        train.run([str(path)])
    assert not (tmp_path / "run").exists()


def test_compiled_operators_that_are_not_there_are_refused_before_the_text_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.train.run.prepare_process", lambda *_, **__: 1)
    monkeypatch.setattr(extension, "load", lambda: "no C++ compiler; build it: so")
    path = write_run(tmp_path, changed({"model.kernels": "fused", "run.folder": str(tmp_path / "run")}))
    with pytest.raises(ConfigError, match=r'model.kernels: "fused".*no C\+\+ compiler; build it: so'):
        train.run([str(path)])
    assert not (tmp_path / "run").exists()


def test_without_a_run_file_the_text_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(
        train.Trainer, "run", lambda trainer, source: started.append((trainer.config, source))
    )
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times.\n" * 100)
    monkeypatch.chdir(tmp_path)
    train.run(["--data.source", "book.txt", "--training.steps", "20"])
    [(config, source)] = started
    assert (config.run.folder, config.training.steps, config.tokenizer.vocab_size) == ("runs/book", 20, 264)
    assert source == "the command line"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            [],
            "RUN.toml: is required without --data.source; name a text, as in megalite train --data.source",
        ),
        (["--training.steps", "3"], "RUN.toml: is required without --data.source"),
        (["--data.source", "none.txt", "--training.setps", "3"], "has 2 problems"),
    ],
)
def test_a_command_line_without_run_file_and_text_is_refused(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        train.run(argv)


def test_several_machines_need_a_run_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_by_launcher(monkeypatch, 0, world_size=4, local_size=2)
    monkeypatch.setattr(train, "tell_others", lambda *_: False)
    assert train.run(["--data.source", "stdlib"]) == 2
    said = capsys.readouterr().err
    assert "RUN.toml: is required on several machines; write one with megalite init" in said


def test_a_prepared_pair_alone_has_its_length(tmp_path: Path) -> None:
    for name in ("ids.v1", "lone"):
        (tmp_path / f"{name}.idx").write_bytes(b"")
    (tmp_path / "ids.v1.bin").write_bytes(bytes(6000))
    for source, tokens in (("ids.v1", 3000), ("ids.v1.bin", 3000), ("lone", 0)):
        starter = starter_of(["--data.source", str(tmp_path / source)])
        assert (starter.tokens, starter.words) == (tokens, None)
    assert starter_of(["--data.source", "x" * 5000]).documents == 0


@pytest.mark.parametrize(("coordinator", "expected"), [("10.0.0.1:4000/ab", 0), ("", 75)])
def test_an_orderly_end_is_no_failure_to_the_backend_of_megalite_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coordinator: str, expected: int
) -> None:
    """mpirun and torchrun end the ranks that are still saving when one exits with 75."""
    monkeypatch.setattr(train.Trainer, "run", lambda *_: 75)
    monkeypatch.setenv("MEGALITE_COORDINATOR", coordinator)
    path = write_run(tmp_path, changed({"model.kernels": "reference"}))
    assert train.run([str(path)]) == expected

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Trainer, "run", interrupted)
    if coordinator:
        assert train.run([str(path)]) == 0
    else:
        with pytest.raises(KeyboardInterrupt):
            train.run([str(path)])


def test_a_misspelt_option_is_answered_with_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.run(["--stesp", "5"])
    assert "--stesp; did you mean --training.steps? megalite train --help" in capsys.readouterr().err
