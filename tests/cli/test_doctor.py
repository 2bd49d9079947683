"""megalite doctor says what is here, what is missing, and is not fooled by another project's apex."""

import json
import sys

import pytest

from megalite.cli import main
from megalite.launcher import machine


def test_the_report_names_every_package_and_what_would_be_used(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in (*machine.PACKAGES, *machine.PROGRAMS, "collectives", "precision", "attention", "launcher"):
        assert name in said
    assert f" + torch        {machine._version('torch')}" in said


def test_json_holds_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in report["packages"]} == set(machine.PACKAGES)
    assert report["used"]["torch"].startswith(machine._version("torch"))


def test_a_missing_package_is_said_with_its_price_and_the_exit_code(capsys, monkeypatch):
    version = machine._version
    monkeypatch.setattr(
        machine, "_version", lambda name: "" if name in ("torch", "mpi4py") else version(name)
    )
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "- torch        not found: nothing runs" in said
    assert "- mpi4py       not found: torchrun, deepspeed" in said
    assert "nothing can run here without torch" in said


@pytest.mark.parametrize("compiled", [False, True])
def test_an_apex_without_compiled_parts_is_not_apex(tmp_path, monkeypatch, compiled):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    if compiled:
        (tmp_path / "amp_C.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    finding = machine.apex()
    assert bool(finding.found) == compiled
    assert compiled or "no compiled parts" in finding.without
