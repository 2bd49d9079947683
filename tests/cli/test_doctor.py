"""megalite doctor says what is here, what is missing, and is not fooled by another project's apex."""

import json
import os
import sys
from importlib import metadata

import pytest

from megalite.cli import main
from megalite.launcher import machine_report as machine
from tests.support import reported_faults as faults
from tests.support.museum import exhibit


def test_the_report_names_every_package_and_what_would_be_used(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in (*machine.PACKAGES, *machine.PROGRAMS, "collectives", "precision", "attention", "launcher"):
        assert name in said
    assert f" + torch        {metadata.version('torch')}" in said


def test_json_holds_the_same(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in report["packages"]} == set(machine.PACKAGES)
    assert report["used"]["torch"].startswith(metadata.version("torch"))


def test_a_missing_package_is_said_with_its_price_and_the_exit_code(capsys, monkeypatch):
    version = metadata.version

    def found(name: str) -> str:
        if name in ("torch", "mpi4py"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", found)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "- torch        not found: nothing runs" in said
    assert "- mpi4py       not found: mpirun -x MASTER_ADDR" in said
    assert "nothing can run here without torch" in said


@exhibit(
    "apex#161",
    also=("apex#1755", "apex#954"),
    subject="settings",
    there="an apex without its compiled parts was installed, imported well, and failed in the first step",
    here="such an apex counts as none, and is told apart",
    fault=faults.ANY_APEX_IS_TAKEN,
    case="False",
)
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


def test_a_hostfile_is_checked_before_a_launch(tmp_path, monkeypatch, capsys):
    """ssh is a program of the test that refuses n1 and runs n0's command here."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = n0 ] && exec sh -c "$3"\n'
                   'echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255\n')  # fmt: skip
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(
        "megalite.launcher.hosts.preflight._connect", lambda *_: None
    )  # it listens on all interfaces
    hosts = tmp_path / "hosts"
    hosts.write_text("n0 slots=1\nn1 slots=1\n")
    assert main(["doctor", "--hostfile", str(hosts)]) == 2
    said = capsys.readouterr().out
    assert "error: n1: cannot be reached: ssh: connect to host n1 port 22: Connection refused" in said
    assert said.endswith("1 of 2 hosts cannot run the job\n")
    assert main(["doctor", "--hostfile", str(hosts), "--include", "n0"]) == 0
    assert capsys.readouterr().out.endswith("all hosts can run the job\n")
    assert main(["doctor", "--hostfile", str(hosts), "--exclude", "n7"]) == 2
    assert "n7: is not a host of the hostfile" in capsys.readouterr().err
