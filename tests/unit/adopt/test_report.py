"""The account as it is printed, its refused keys last, and a partial run file with every reason whole."""

import tomllib
from pathlib import Path

import pytest

from megalite.cli import main
from tests.unit.adopt.adopted import write
from tests.unit.adopt.neox_facts import LOCAL, configuration

PARTIAL = ("--output", "run.toml", "--partial")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-NeoX's configuration of sparse attention, which megalite refuses."""
    monkeypatch.chdir(tmp_path)
    write("a.yml", {**configuration("sparse"), **LOCAL})


def test_refused_keys_are_the_last_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adopt", "a.yml"]) == 2
    shown = capsys.readouterr()
    above, _, last = shown.out.partition("\nrefused:\n")
    assert "attention_config" in last and "sparsity_config" in last
    assert all(line.startswith("  ") for line in last.splitlines())
    assert "defaults of GPT-NeoX" in above and "differences that no setting removes" in above
    assert shown.err.startswith("error: refused keys change the numbers")


def test_taken_and_idle_keys_are_counted_unless_all_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["adopt", "a.yml"])
    short = capsys.readouterr().out
    main(["adopt", "a.yml", "--all"])
    long = capsys.readouterr().out
    assert "num_layers 12 -> model.num_hidden_layers = 12" in long and "(num_layers" not in long
    assert "num_layers 12" not in short and "wall_clock_breakdown true" not in short
    (taken,) = [line for line in short.splitlines() if line.startswith("taken: ")]
    assert taken.endswith("--all lists them")
    _, _, listed = long.partition("\ntaken:\n")
    assert int(taken.split()[1]) == listed.split("\n\n")[0].count("\n") + 1
    # Whatever changes the run, or was not written by the user, stays a line of its own.
    assert short.count("GPT-NeoX's default") == long.count("GPT-NeoX's default") > 5
    assert len(short.splitlines()) < len(long.splitlines()) / 2


def test_the_value_of_a_secret_is_neither_shown_nor_written(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = {"wandb_api_key": "s3cr3t-1", "hub_token": "s3cr3t-2", "webhook_url": "s3cr3t-3"}
    write("b.yml", {**secrets, "eos_token": "<|end|>"})
    main(["adopt", "a.yml", "b.yml", "--all", *PARTIAL])
    shown = capsys.readouterr()
    assert "s3cr3t" not in shown.out + shown.err + Path("run.toml").read_text()
    assert "wandb_api_key (not shown)" in shown.out and "<|end|>" in shown.out


def test_a_partial_run_file_has_the_whole_of_each_remedy() -> None:
    value = "A" * 30 + "\x1b\n" + "B" * 20
    write(
        "a.yml", {**configuration("sparse"), **LOCAL, "load": "theirs", "save": "ours", "moe_num_experts": 8}
    )
    write("b.yml", {f"unknown_{value}": value})
    assert main(["adopt", "a.yml", "b.yml", *PARTIAL]) == 0
    text = Path("run.toml").read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    joined = " ".join(line.removeprefix("#").strip() for line in comments)
    assert (
        "run megalite convert import theirs ours where the checkpoint is, before the run, and add --partial"
        in joined
    )
    assert "train another model, or keep GPT-NeoX for this one" in joined
    assert "remove it, or set what it means in run.toml" in joined
    assert all(len(line) <= 110 or len(line.split()) <= 3 for line in comments)
    assert tomllib.loads(text)["model"]["num_hidden_layers"] == 12


def test_a_partial_run_file_that_lacks_a_setting_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    table = {
        key: value for key, value in LOCAL.items() if not key.startswith(("data", "train_data", "valid"))
    }
    write("a.yml", {**configuration("sparse"), **table})
    assert main(["adopt", "a.yml", *PARTIAL]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.splitlines()[-2:] == [
        "to be set in run.toml before it runs:",
        "  data.source: is required; name a text file, or several texts with weights in [[data.blend]]",
    ]
