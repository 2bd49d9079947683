"""Variables that travel to the ranks: the list, --export, --env-file, and secrets that stay here."""

import pytest

from megalite.errors import LaunchError
from megalite.launcher.hosts.exported_variables import named_variables, read_env_file, shown, travelling

HERE = {
    "PATH": "/bin",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_DEBUG": "INFO",
    "HF_HOME": "/cache",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": "/src",
    "LC_ALL": "C",
    "MEGALITE_NO_APEX": "1",
    "HF_TOKEN": "hf_secret",
    "WANDB_API_KEY": "k",
    "MLFLOW_TRACKING_PASSWORD": "p",
    "CUDA_VISIBLE_DEVICES": "0",
    "MEGALITE_COORDINATOR": "10.0.0.1:5/nonce",
    "RANK": "3",
    "HOME": "/root",
    "EDITOR": "vi",
    "NCCL_FUNCTION": "() {\n}",
}


def test_the_list_travels_without_secrets_devices_and_ranks():
    expected = [
        "GLOO_SOCKET_IFNAME",
        "HF_HOME",
        "LC_ALL",
        "MEGALITE_NO_APEX",
        "NCCL_DEBUG",
        "PATH",
        "PYTHONPATH",
    ]
    assert travelling(HERE, {}) == {name: HERE[name] for name in [*expected, "TOKENIZERS_PARALLELISM"]}


def test_a_named_secret_travels_and_is_not_shown():
    named = named_variables(["HF_TOKEN", "EDITOR=nano -w", "EMPTY="], [], HERE)
    assert named == {"HF_TOKEN": "hf_secret", "EDITOR": "nano -w", "EMPTY": ""}
    sent = travelling(HERE, named)
    assert sent["HF_TOKEN"] == "hf_secret" and list(sent) == sorted(sent)
    assert shown(sent)["HF_TOKEN"] == "(not shown)" and shown(sent)["EDITOR"] == "nano -w"
    assert "hf_secret" not in str(shown(sent))


def test_options_go_before_the_file(tmp_path):
    path = tmp_path / "env"
    path.write_text("A=file\nB=file\n")
    assert named_variables(["A=option"], [path], {}) == {"A": "option", "B": "file"}
    later = tmp_path / "later"
    later.write_text("B=later\n")
    assert named_variables([], [path, later], {})["B"] == "later"


def test_wrong_options_are_told_together():
    with pytest.raises(LaunchError) as caught:
        named_variables(["NOT_SET", "A-B=1", "RANK=0", "CUDA_VISIBLE_DEVICES", "C=x\ny"], [], HERE)
    assert str(caught.value).split("\n  ") == [
        "the environment that travels has 5 problems",
        "--export NOT_SET: the variable is not set; write NOT_SET=VALUE",
        "--export A-B: is not the name of a variable; use letters, digits and _",
        "--export RANK: is set for each rank by its launcher; leave it out",
        "--export CUDA_VISIBLE_DEVICES: numbers the GPUs of one host; choose slots with --include NAME:0,1",
        "--export C: the value has several lines; use one line",
    ]


def test_a_file_with_blank_lines_comments_and_quotes_is_read(tmp_path):
    """DeepSpeed fails at the blank line, and starts nothing with the comment, with exit code 0."""
    path = tmp_path / "env"
    path.write_bytes(
        b"\n# a comment\n  # another\nA=1\r\nB=\"two words\"\nC='it has # and $HOME'\nD=a=b\nE=\nF=plain words\n"
        b'G=say "hi"\n'
    )
    assert read_env_file(path) == {
        "A": "1",
        "B": "two words",
        "C": "it has # and $HOME",
        "D": "a=b",
        "E": "",
        "F": "plain words",
        "G": 'say "hi"',
    }


WRONG = {
    "hf_secret": "the line has no =; write KEY=VALUE",
    "A = 1": "A has spaces around =; write A=VALUE",
    "export A=1": "'export A' begins with export; write KEY=VALUE only",
    "1A=1": "'1A' is not the name of a variable",
    "LOCAL_RANK=1": "'LOCAL_RANK' is set for each rank by its launcher",
    'A="open': 'the value of A begins with ", which does not close it; end it with "',
    "A='a' b": "the value of A begins with ', which does not close it",
    "A=1 # why": "the value of A has a # behind a space; quote the value, or move the comment",
    "FIRST=2": "FIRST is set twice, first in line 1; keep one of them",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named_and_its_secrets_are_not_shown(tmp_path, line):
    path = tmp_path / "env"
    path.write_text(f"FIRST=1\n{line}\nLAST\n")
    with pytest.raises(LaunchError) as caught:
        read_env_file(path)
    text = str(caught.value)
    assert text.startswith(f"--env-file {path} has 2 problems\n  line 2: {WRONG[line]}")
    assert "line 3: the line has no =" in text and "hf_secret" not in text


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LaunchError, match=r"--env-file .*: the file cannot be read: No such file"):
        read_env_file(tmp_path / "env")
