"""Hostfiles: DeepSpeed's format, with every problem at its line and column where DeepSpeed guesses."""

import pytest

from megalite.errors import LaunchError
from megalite.launcher.hosts.hostfile import Host, read_hostfile
from tests.support import reported_faults as faults
from tests.support.museum import exhibit


def read(tmp_path, text: str | bytes) -> tuple[Host, ...]:
    path = tmp_path / "hosts"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_hostfile(path)


def problems(tmp_path, text: str | bytes) -> list[str]:
    with pytest.raises(LaunchError) as caught:
        read(tmp_path, text)
    assert caught.value.exit_code == 2
    first, *rest = str(caught.value).split("\n  ")
    assert first.startswith(f"the hostfile {tmp_path / 'hosts'} has {len(rest)} problem")
    return rest


@pytest.mark.parametrize(
    "text",
    [
        "n0 slots=2\nn1 slots=1\n",
        "# two hosts\n\n  n0\tslots=2   # the first\nn1 slots=1#end",
        "n0 slots=2\r\nn1 slots=1\r\n",
        b"\xef\xbb\xbfn0 slots=2\nn1 slots=1",
    ],
    ids=["plain", "comments", "CRLF", "byte order mark"],
)
def test_hosts_are_read_in_order(tmp_path, text):
    assert read(tmp_path, text) == (Host("n0", (0, 1)), Host("n1", (0,)))


@pytest.mark.parametrize("name", ["node-a.cluster", "10.0.0.7", "gpu_7", "N0"])
def test_names_that_every_backend_takes(tmp_path, name):
    assert read(tmp_path, f"{name} slots=1") == (Host(name, (0,)),)


# The text of a line -> where, what and the remedy. DeepSpeed 0.19.8 accepts those marked with *.
WRONG = {
    "n0 slots=0": ("line 2, column 4: 'slots=0'", "use 1 or more"),  # *
    "n0 slots=2x": ("line 2, column 4: 'slots=2x'", "write `slots=N`"),  # *
    "n0 slots=2 max_slots=4": ("line 2, column 12: 'max_slots=4' stands behind", "# max_slots=4"),  # *
    "user@n0 slots=2": ("line 2, column 1: 'user@n0' names a user", "write 'n0'"),  # *
    "n[0-1] slots=2": ("line 2, column 1: 'n[0-1]' stands for several hosts", "one line for each"),  # *
    "n0,n1 slots=2": ("line 2, column 1: 'n0,n1' stands for several hosts", "one line for each"),  # *
    "[::1] slots=2": ("line 2, column 1: '[::1]' is an IPv6 address", "/etc/hosts"),  # *
    "-oProxyCommand=x slots=2": ("line 2, column 1: '-oProxyCommand=x' begins with -", "option"),  # *
    "n0 slots=٢": ("line 2, column 4: 'slots=٢' is not a number", "write `slots=N`"),  # *
    "nodé slots=2": ("line 2, column 1: 'nodé' is not the name", "ASCII"),  # *
    "n0;reboot slots=2": ("line 2, column 1: 'n0;reboot' is not the name", "ASCII"),  # *
    "$(id) slots=2": ("line 2, column 1: '$(id)' is not the name", "ASCII"),  # *
    "n0": ("line 2, column 3: 'n0' has no slots", "write `n0 slots=N`"),
    "host:2": ("line 2, column 1: 'host:2' has a colon", "write `host slots=2`"),
    "n0 slots = 2": ("line 2, column 4: 'slots = 2' has spaces", "write `slots=2`"),
    "n0 slots=-1": ("line 2, column 4: 'slots=-1' is not a number", "write `slots=N`"),
    "n0 Slots=2": ("line 2, column 4: 'Slots=2' is not a number", "write `slots=N`"),
    "n0 max_slots=4 slots=2": ("line 2, column 4: 'max_slots=4' is not a number", "write `slots=N`"),
    "n0 slots=99999": ("line 2, column 4: 'slots=99999' is more than 4096", "GPUs"),
    "First slots=2": ("line 2, column 1: 'First' is named twice, first in line 1", "one line"),
    "n0\x00 slots=1": ("line 2, column 1: 'n0\\x00' is not the name", "ASCII"),
}


@exhibit(
    "DeepSpeed#3669",
    also=("DeepSpeed#2612",),
    subject="launch",
    there="a hostfile with a mistyped line was refused without saying which, or read as something else",
    here="each wrong line is named with line, column and remedy",
    fault=faults.SLOTS_ARE_GUESSED,
    case="'n0 slots=0'",
)
@pytest.mark.parametrize("line", WRONG, ids=ascii)
def test_a_wrong_line_is_named_with_line_column_rule_and_remedy(tmp_path, line):
    where, remedy = WRONG[line]
    found = problems(tmp_path, f"first slots=1\n{line}\n")
    assert found[0].startswith(where) and remedy in found[0]


def test_all_problems_are_told_at_once(tmp_path):
    found = problems(tmp_path, "a slots=0 x\n\nb\na slots=1\nc slots=2\n")
    assert [line.split(":")[0] for line in found] == [
        "line 1, column 3",
        "line 1, column 11",
        "line 3, column 2",
        "line 4, column 1",
    ]


@pytest.mark.parametrize("text", ["", "\n \n# nothing\n"], ids=["empty", "comments"])
def test_a_file_without_hosts_is_refused(tmp_path, text):
    assert problems(tmp_path, text) == [
        "line 1: the file names no host; write one line like `node-a slots=8` for each"
    ]


def test_bytes_that_are_no_text_are_named(tmp_path):
    [found] = problems(tmp_path, b"n\xff slots=1\n")
    assert found.startswith("line 1, column 1: 'n\ufffd' is not the name")


def test_a_missing_file_never_means_this_machine(tmp_path):
    with pytest.raises(LaunchError, match="there is no such file; write one line like `node-a slots=8`"):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(LaunchError, match="the file cannot be read: Is a directory"):
        read_hostfile(tmp_path)
