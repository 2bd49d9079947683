"""The preflight with this machine's shell as every host: what the real probe answers, and which host it blames."""

import shlex
import sys
from pathlib import Path

import pytest

from megalite.errors import LaunchError
from megalite.launcher.hosts import probe
from megalite.launcher.hosts.host_report import HostRequirements
from megalite.launcher.hosts.preflight import Preflight, Transport, locally, over_srun, over_ssh, preflight

ROOT = Path(__file__).parents[4]
REFUSED = "ssh: connect to host n1 port 22: Connection refused"


def wanted(folder: Path = ROOT, **settings) -> HostRequirements:
    return HostRequirements(**{"folder": folder, "python": sys.executable, **settings})


def asked(hosts: dict[str, str], needs: HostRequirements | None = None, seconds: float = 20.0) -> Preflight:
    """Ask hosts of which each first runs a shell command of its own: `exit 255` is a host that ssh cannot reach."""
    transport = Transport("local", lambda host: ["sh", "-c", f'{hosts[host]}\nexec sh -c "$1"', host])
    return preflight(dict.fromkeys(hosts, 1), needs or wanted(), transport, seconds)


def said(result: Preflight, level: str = "error") -> list[str]:
    return [line for line in result.lines() if line.startswith(f"{level}: ")]


def cell(result: Preflight, row: str) -> str:
    return next(line for line in result.lines() if line.startswith(f"{row:<14}"))


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_host_that_can_run_the_job_passes(tmp_path):
    (tmp_path / "run.toml").write_text("[run]\n")
    needs = wanted(
        tmp_path,
        run_file=Path("run.toml"),
        run_folder=Path("runs/new"),
        environment={"PYTHONPATH": str(ROOT)},
    )
    result = asked({"n0": "", "n1": "echo a banner of the shell"}, needs)
    assert result.passed == ["n0", "n1"] and not said(result)
    assert cell(result, "run folder").split() == ["run", "folder", "shared", "shared"]
    assert (
        cell(result, "library").split()[1]
        == probe.digest(str(Path(probe.__file__).parents[2] / "ops/libmegalite.so"))["digest"]
    )
    result.require()
    assert [each.name for each in tmp_path.iterdir()] == ["run.toml"]  # its marker is gone


def test_all_unreachable_hosts_are_named_at_once():
    lost = f"echo '{REFUSED}' >&2; exit 255"
    result = asked({"n0": "", "n1": lost, "n2": lost})
    first, second = said(result)
    remedy = "try `ssh -o BatchMode=yes n1 true`: it must end without a question"
    assert first == f"error: n1: cannot be reached: {REFUSED}; {remedy}"
    assert second.startswith("error: n2: cannot be reached")
    assert cell(result, "reachable").split() == ["reachable", "yes", "!", "no", "!", "no"]
    assert result.passed == ["n0"]
    with pytest.raises(
        LaunchError, match=r"^n1, n2 did not pass the preflight, for the reasons above; no rank was started"
    ) as error:
        result.require()
    assert error.value.exit_code == 2


def test_a_host_that_does_not_answer_ends_the_wait():
    result = asked({"n3": "exec sleep 60"}, seconds=0.1)
    assert said(result)[0].startswith("error: n3: gave no answer in time: 0.1 s; look whether the host is up")
    assert cell(result, "reachable").split() == ["reachable", "!", "no", "answer"]


def test_another_environment_on_a_host_is_named(tmp_path):
    """Folder, interpreter and package are three sentences, each with its own remedy."""
    here = tmp_path / "work"
    here.mkdir()
    python = executable(tmp_path / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} $OPTIONS "$@"\n')
    needs = wanted(here, python=str(python), environment={"PYTHONPATH": str(ROOT)})
    gone = asked({"n0": "", "n1": ""}, wanted(tmp_path / "gone", python=str(python)))
    assert said(gone) == [
        f"error: n0, n1: the working folder {tmp_path}/gone does not exist; "
        "make the folder there, or launch from a folder that all hosts share"
    ]
    without = asked({"n0": "", "n1": "export OPTIONS='-S -I'"}, needs)
    assert f"error: n1: megalite cannot be imported by {python}: ModuleNotFoundError" in "\n".join(
        said(without)
    )
    assert (
        f"error: n1: torch is not installed for {python}; install it there: `{python} -m pip install torch`"
        in said(without)
    )
    assert cell(without, "megalite").split()[-2:] == ["!", "missing"]
    broken = asked({"n0": "", "n1": "export OPTIONS=--not-an-option"}, needs)
    assert said(broken)[0].startswith(f"error: n1: {python} gave no facts:")
    missing = asked({"n0": ""}, wanted(here, python="/no/such/python"))
    assert said(missing)[0].startswith(
        "error: n0: there is no interpreter /no/such/python; install the same environment"
    )


def test_a_checkout_next_to_the_working_folder_does_not_hide_megalite_silently(tmp_path):
    (tmp_path / "megalite").mkdir()
    python = executable(tmp_path / "python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    result = asked({"n0": "unset PYTHONPATH"}, wanted(tmp_path, python=str(python)))
    assert said(result)[0] == (
        f"error: n0: the folder {tmp_path}/megalite has no __init__.py and hides the installed package megalite; "
        f"launch from another folder than {tmp_path}"
    )


def test_a_run_file_that_a_host_lacks_or_has_otherwise(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text("[optimizer]\nlearning_rate = 1e-3\n")
    needs = wanted(run_file=run_file)
    assert needs.run_digest
    run_file.write_text("[optimizer]\nlearning_rate = 3e-3\n")
    assert said(asked({"n1": ""}, needs)) == [
        f"error: n1: {run_file} has another content than on this machine; "
        "copy this machine's to it, or use a shared folder"
    ]
    run_file.unlink()
    result = asked({"n1": ""}, needs)
    assert said(result)[0].startswith(
        f"error: n1: {run_file} cannot be read: No such file or directory; copy it there"
    )
    assert "! No such file" in cell(result, "run file")


def test_a_run_folder_that_is_not_shared(tmp_path, monkeypatch):
    """n1 stands elsewhere, so that the same relative path is another folder."""
    monkeypatch.setattr("megalite.launcher.hosts.preflight._MARKER_SECONDS", 0)
    (tmp_path / "other").mkdir()
    elsewhere = f'c=$(printf %s "$1" | sed "s#cd -- {tmp_path} #cd -- {tmp_path}/other #"); exec sh -c "$c"'
    needs = wanted(tmp_path, run_folder=Path("runs"), environment={"PYTHONPATH": str(ROOT)})
    result = asked({"n0": "", "n1": elsewhere}, needs)
    assert said(result) == [
        "error: n1: run.folder runs is another folder than the first host's; a checkpoint needs one; "
        "use a folder of a file system that all hosts share"
    ]


def test_hosts_connect_both_ways_and_never_over_loopback():
    """On one machine every host is reached over lo, the address that no other host could use."""
    shell = Transport("shell", lambda host: ["sh", "-c"])
    needs = wanted(environment={"GLOO_SOCKET_IFNAME": "lo"})
    result = preflight({"n0": 1, "n1": 1}, needs, shell)
    n1 = result.reports[1]
    assert n1.to_first == {"address": "127.0.0.1", "own": "127.0.0.1", "interface": "lo", "error": ""}
    assert n1.from_first == n1.to_launcher == n1.to_first
    assert said(result) == [
        "error: n1: it reaches n0 through 127.0.0.1, an address of this host alone; "
        "remove the line with 127.* and n0 from its /etc/hosts"
    ]


def test_another_program_on_a_port_is_not_taken_for_the_host():
    listener = probe.Listener("a token", address="127.0.0.1")
    try:
        right = probe.reach(["127.0.0.1"], listener.port, "a token")
        wrong = probe.reach(["127.0.0.1"], listener.port, "another")
        with pytest.raises(OSError, match="no port from"):
            probe.Listener("second", [listener.port], "127.0.0.1")
    finally:
        listener.close()
    assert right["own"] == "127.0.0.1" and not right["error"]
    assert wrong["error"] == f"127.0.0.1 port {listener.port}: another machine or program answers"


def test_commands_of_the_transports():
    assert list(over_ssh(("-p", "2222")).prefix("n1")) == [
        *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-p", "2222", "--", "n1")
    ]
    assert list(over_srun().prefix("n1"))[-3:] == ["--nodelist=n1", "sh", "-c"]
    assert list(locally().prefix("n1")) == ["sh", "-c"]
    gone = preflight({"n1": 1}, wanted(), Transport("ssh", lambda host: ["no-such-program", host]))
    assert said(gone)[0].startswith(
        "error: n1: cannot be reached: no-such-program cannot be run: No such file"
    )
