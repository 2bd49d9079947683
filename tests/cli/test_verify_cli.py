"""megalite verify: a sound layout has a certificate, a planted fault is named, and wrong input is refused at once."""

import json
import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.config.load import load_config
from megalite.launcher.local import ENDING
from megalite.launcher.rank.detect import RankInfo
from megalite.verify.record import RecordJob, record_rank
from megalite.verify.run import Verifier, verify
from tests.support.documents import documented
from tests.support.jobs import Job, training_here
from tests.support.mutations import planted_fault
from tests.support.parity import LAYOUT_RTOL


def record_faulty(fault: str, info: RankInfo, job: RecordJob) -> int:
    with planted_fault(fault):
        return record_rank(info, job)


def test_a_layout_is_certified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_file = Job.write(tmp_path).run_file
    with training_here():
        code = main(["verify", str(run_file), "--data.document_mask", "true", "--steps", "1", "--json"])
    document = json.loads(capfd.readouterr().out)
    always, every = documented("verify")
    assert code == document["exit_code"] == 0 and document["holds"] and always <= document.keys() <= every
    certificate = json.loads((tmp_path / "run.verify.json").read_text())
    assert certificate == {name: document[name] for name in certificate}
    assert certificate["departures"] == [] and certificate["documents"] > 0 and certificate["leaks"] == []
    assert certificate["worst"]["gradient before the sum"]["tensors"] == 29
    text = (tmp_path / "run.verify.txt").read_text()
    assert text.startswith("holds: tensor 2 x pipeline 2 x data 1 ") and "not checked:\n" in text
    assert certificate["config_sha256"] in text


def test_a_planted_fault_is_named_with_its_operation_and_ranks(tmp_path: Path) -> None:
    run_file = Job.write(tmp_path, tensor=1, pipeline=1, data=2).run_file
    config = load_config(run_file, "--deepspeed.zero_optimization.stage", "0")
    with training_here():
        found = verify(config, worker=partial(record_faulty, "missing sum over data-parallel ranks"))
    assert not found.holds and found.worst["gradient before the sum"]["error"] <= LAYOUT_RTOL
    first = found.departures[0]
    assert (first.quantity, first.name, first.step, first.ranks) == (
        "gradient",
        "model.norm.weight",
        1,
        (0, 1),
    )
    assert found.departure.startswith("gradient of model.norm.weight, step 1, after the sum over")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["verify"], "RUN.toml"),
        (["verify", "nowhere.toml"], "nowhere.toml"),
        (["verify", "{run}", "--parallel.tensor", "3"], "parallel.tensor"),
        (["verify", "{run}", "--steps", "0"], "argument --steps: '0' is not a whole number of 1"),
        (["verify", "{run}", "--compared-steps=0"], "argument --compared-steps: '0' is not"),
        (["verify", "{run}", "--precision", "runn"], "argument --precision: invalid choice: 'runn'"),
        (["verify", "{run}", "--stesp", "3"], "did you mean --steps?"),
        (["verify", "{run}", "--output", "proof.txt"], "use proof.json"),
        (["verify", "{run}", "--output", "{run}/proof.json"], "cannot be written"),
        (["verify", "{run}", "--tolerance", "1"], "--tolerance: has no effect without --checkpoint"),
        (["verify", "{run}", "--layers", "2"], "--layers: has no effect without --from"),
        (
            ["verify", "--from", "folder", "--layers", "0"],
            "argument --layers: '0' is not a whole number of 1",
        ),
        (["verify", "{run}", "--text", "book.txt"], "--text: has no effect without --from"),
        (
            ["verify", "{run}", "--matrix", "2", "--parallel.tensor=1"],
            "--parallel.tensor: has no effect with -",
        ),
        (["verify", "--from", "folder", "--steps", "3"], "--steps: has no effect with --from"),
        (["verify", "--checkpoint", "a", "b", "--full-size"], "--full-size: has no effect with --checkpoint"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    words: list[str], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = Job.write(tmp_path).run_file
    try:
        code = main([word.format(run=run_file) for word in words])
    except SystemExit as left:
        code = left.code
    assert code == 2 and key in capsys.readouterr().err


def test_a_run_folder_is_answered_with_what_to_name_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, export = tmp_path / "first", tmp_path / "first" / "export"
    export.mkdir(parents=True)
    assert main(["verify", str(run)]) == 2
    assert f"{run}: is a folder; name a RUN.toml" in capsys.readouterr().err
    (run / "run.toml").touch()
    assert main(["verify", str(run)]) == 2
    assert f"{run}: is a folder; name its run file, {run / 'run.toml'}" in capsys.readouterr().err
    assert main(["verify", "--from", str(run)]) == 2
    assert f"--from: {run} is a run folder; write its export first: megalite " in capsys.readouterr().err
    (export / "config.json").touch()
    assert main(["verify", "--from", str(run)]) == 2
    assert f"--from: {run} is a run folder; name its export, {export}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_scratch_folder_wherever_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    run_file = Job.write(tmp_path).run_file
    # As where the command itself imports torch, and nothing runs for it.
    monkeypatch.setattr(Verifier, "certified", lambda *arguments: os.kill(os.getpid(), number))
    unhandled: list[int] = []
    before = {each: signal.signal(each, lambda got, frame: unhandled.append(got)) for each in ENDING}
    try:
        assert main(["verify", str(run_file)]) == 130 and not unhandled
        # A shell may send SIGHUP twice: the process is ending, and nothing ends it sooner.
        assert {signal.getsignal(each) for each in ENDING} == {signal.SIG_IGN}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not list((tmp_path / "scratch").iterdir())
