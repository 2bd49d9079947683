"""Nothing of a script is executed, what was not read is named, and no script takes more than a bounded time."""

import os
import random
import subprocess
import tomllib
from pathlib import Path

import pytest

from megalite.cli import main
from megalite.convert.adopt.account import Outcome
from megalite.convert.adopt.report import account_lines, run_file_text
from megalite.convert.adopt.shell.expand import TooLong, as_source
from megalite.convert.adopt.shell.script import ScriptText, read_script
from megalite.convert.adopt.shell.tokens import ShellSyntax
from megalite.convert.adopt.systems import adopt
from megalite.errors import ConfigError

SCRIPTS = Path(__file__).parent / "scripts"
PIECES = (
    '"',
    "'",
    "`",
    "$(",
    "${",
    "}",
    ")",
    "$((",
    "\\\n",
    "\n",
    "if ",
    "fi\n",
    "esac",
    "--lr",
    " 0 ",
    "-5",
    "1e999",
    "nan",
)

TRAIN = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8"
COMMANDS = {
    "X=$(touch marker)": "$(touch marker): a command, not executed",
    "X=`touch marker`": "`touch marker`: a command, not executed",
    "X=${Y:-$(touch marker)}": "$(touch marker): a command, not executed",
    'X="a $(touch marker) b"': "$(touch marker): a command, not executed",
    "X=$((1 + $(touch marker)))": "$((1 + $(touch marker))): a command, not executed",
    "A=(1 $(touch marker) 2)": "$(touch marker): a command, not executed",
    "cat <<EOT > file\n$(touch marker)\nEOT": "$(touch marker): a command, not executed",
    "eval touch marker": "line 1: eval touch marker: read as text, not executed",
    "source marker.sh": "line 1: source marker.sh: another file, not read",
    ". marker.sh": "line 1: . marker.sh: another file, not read",
    "if touch marker; then echo; fi": "line 1: if touch marker: known only in a run; no branch is read",
    "while touch marker; do echo; done": "line 1: while: its body is skipped",
    "for X in 1 2; do touch $X; done": "line 1: for X: its body is read once, with $X unknown",
}


def words(script: str, **values: str) -> list[list[str]]:
    return [[as_source(word) for word in command.words] for command in read_script(script, values).commands]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_named_and_not_executed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    for module, name in ((subprocess, "Popen"), (os, "system"), (os, "popen"), (os, "posix_spawn")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(f"{line}\n{TRAIN}\n")
    main(["adopt", "run.sh", "--partial"])
    assert COMMANDS[line] in capsys.readouterr().out
    assert not Path("marker").exists()


def test_a_value_of_a_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(f"{TRAIN} --lr $(rm -rf /) --micro-batch-size `echo 4` $EXTRA_ARGS\n")
    assert main(["adopt", "run.sh"]) == 2
    shown = capsys.readouterr().out
    assert "--lr $(rm -rf /): its value $(rm -rf /) is known only when the script runs" in shown
    assert "--micro-batch-size `echo 4`: its value `echo 4` is known only" in shown
    assert "$EXTRA_ARGS: further arguments that are known only when the script runs" in shown


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("A=aaaaaaaa\n" + "A=$A$A\n" * 64, "grows beyond"),
        ("A=(a b)\n" + 'A+=("${A[@]}")\n' * 64, "grows beyond"),
        pytest.param(
            "A=aaaaaaaa\n" + 'A="$A $A"\n' * 13 + "echo " + "$A " * 500,
            "grows beyond|more than .* words",
            marks=pytest.mark.extended,
        ),
        ("A='" + "x " * 60000 + "'\n" + "for B in $A; do :; done\n" * 200, "expansions .* grows beyond"),
        ("A=" + "${B:-" * 100 + "x" * 120000 + "}" * 100, "expansions .* grows beyond"),
        ("f() { f; }\nf\n", "nested deeper"),
        ("f() { f; f; }\nf\n", "nested deeper"),
        ("if true; then\n" * 5000, "nested deeper"),
        ("( " * 5000, "nested deeper"),
        ('"${' * 20000, "has no end|nested too deeply"),
        ("$(" * 200000, "has no end|nested too deeply"),
        ("echo 'never closed", "the quote ' has no end"),
        ("X=${Y", r"the bracket \{ has no end"),
        ("if true; then echo a", "fi is missing"),
        ("for x in 1", "do is missing"),
        ("case a in", "esac is missing"),
    ],
)
def test_a_script_without_end_is_one_error(script: str, says: str) -> None:
    with pytest.raises((ShellSyntax, TooLong), match=says):
        read_script(script, {})


@pytest.mark.parametrize(
    "expression", ["9**9**9", "1/0", "1<<99999", "(" * 300 + "1" + ")" * 300, "9" * 900, "__import__('os')"]
)
def test_arithmetic_is_small(expression: str) -> None:
    [[_, value]] = words(f"echo $(({expression}))")
    assert value.startswith("$((") or value == "1"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "is not UTF-8"),
        (b"torchrun --num-layers 2\x00 --lr 1", "holds a zero byte"),
        (b"#" * (1 << 20) + b"\n", "has more than 1,048,576 bytes"),
        (b"echo hello\n", "is of no known program"),
        (b"# --num-layers 2 --lr 3\necho\n", "starts no program with arguments of Megatron-LM"),
        (b"torchrun x.py --num-layers 2 --lr '1\n", "the quote ' has no end"),
    ],
)
def test_a_file_that_is_no_launch_script_is_one_error(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_bytes(content)
    assert main(["adopt", str(tmp_path / "run.sh"), "--output", str(tmp_path / "run.toml")]) == 2
    shown = capsys.readouterr().err
    assert says in shown and shown.count("error:") == 1 and not (tmp_path / "run.toml").exists()


def test_a_name_with_control_characters_stays_one_comment(tmp_path: Path) -> None:
    output = tmp_path / "run.toml"
    (tmp_path / "run.sh").write_text(f"{TRAIN} --num-experts $'8\\n[model]' --mock 'a\n[run]\nfolder=1'\n")
    main(["adopt", str(tmp_path / "run.sh"), "--partial", "--output", str(output)])
    assert "\n[run]" not in output.read_text()


def test_a_text_of_a_script_steers_no_terminal_and_no_shell(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"if [ $X = '\x1b[31m' ]; then :; fi\ndeepspeed --hostfile 'a;b' x.py {TRAIN.partition(' ')[2]}\n"
    )
    lines = list(account_lines(adopt([script])))
    assert not any("\x1b" in line for line in lines)
    assert "to start it: megalite launch --hostfile 'a;b' RUN.toml" in lines


SHELL = {
    "A=1; echo $A ${A} '$A' \"$A\" \\$A": ["1", "1", "$A", "1", "$A"],
    'A=; B=${A:-x}; echo $B ${A-y}z ${C:-"p q"}': ["x", "z", "p", "q"],
    "A=(--a 1 '2 3'); A+=(--b); echo \"${A[@]}\" ${A[1]}": ["--a", "1", "2 3", "--b", "1"],
    "A='--a 1'; echo $A \"$A\"": ["--a", "1", "--a 1"],
    "A=3; echo $((A*2)) $(( ${A} + 1 )) $((7/2)) $((-7/2))": ["6", "4", "3", "-3"],
    'A=(a b); echo "$@" "${A[*]}" "${B[@]}" ""': ["a b", ""],
    "A=x; A+=y; export B=$A; echo $B": ["xy"],
    "echo a \\\n  b # comment\n": ["a", "b"],
    "A=2; if [ $A -gt 1 ] && [[ $A == 2 ]]; then B=yes; else B=no; fi; echo $B": ["yes"],
    "A=2; if [ $A -gt 2 ] || [ $A -lt 2 ]; then B=out; elif [ $A -ge 2 ]; then B=in; fi; echo $B": ["in"],
    "A=b; case $A in a|c) B=1 ;; b*) B=2 ;; *) B=3 ;; esac; echo $B": ["2"],
    "for A in x; do B=$A; done; echo $B": ["x"],
    "f() { A=$A$A; }; A=1; f; f; echo $A": ["1111"],
    '[ -z "$A" ] && B=1; A=2; [ $A = 3 ] || B=4; echo $B': ["4"],
    "echo $UNKNOWN $1 $@ ${ARR[@]}": ["$UNKNOWN", "$1"],
}


@pytest.mark.parametrize("script", SHELL)
def test_a_script_is_read_as_bash_reads_it(script: str) -> None:
    assert words(script)[-1][1:] == SHELL[script]


def test_a_file_that_a_script_writes_is_kept() -> None:
    script: ScriptText = read_script(
        "N=4\ncat <<EOT > a.json\n{\"n\": $N}\nEOT\ncat > b <<'EOT'\n$N\nEOT\n", {}
    )
    assert script.files == {"a.json": '{"n": 4}\n', "b": "$N\n"}


def test_a_variable_can_be_set_from_outside() -> None:
    assert words("echo $1 ${B:-c}", **{"1": "a", "B": "b"}) == [["echo", "a", "b"]]


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(40))
def test_a_spoiled_script_is_an_account_or_one_error(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    text = draw.choice([path.read_text() for path in sorted(SCRIPTS.glob("*.sh"))])
    for _ in range(draw.choice((1, 2, 8))):
        place, piece = draw.randrange(len(text)), draw.choice(PIECES)
        text = text[:place] + piece + text[place + draw.choice((0, 0, 1, 20)) :]
    path = tmp_path / "run.sh"
    path.write_text(text)
    try:
        account = adopt([path])
    except ConfigError as error:
        assert error.problems and all(problem.message for problem in error.problems)
    else:
        assert all(answer.reason and answer.remedy for answer in account.with_outcome(Outcome.REFUSED))
        tomllib.loads(run_file_text(account, "run.sh"))
