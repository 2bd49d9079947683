"""`megalite verify --matrix N`: goes on after a failure, counts what is refused, and leaves what was done at Ctrl-C."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from megalite.errors import ConfigError
from tests.support.verification import flags_of, verified_matrix, verifier

# Two data-parallel ranks and nothing else: one head, one layer, a length that two ranks do not divide.
FEW: dict[str, Any] = {
    "model.num_attention_heads": 1,
    "model.num_key_value_heads": 1,
    "model.num_hidden_layers": 1,
    "training.sequence_length": 23,
    "training.global_batch_size": 4,
}
LAYOUTS = ["one rank", *(f"data 2{stage}" for stage in ("", ", ZeRO 1", ", ZeRO 2", ", ZeRO 3"))]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with verifier() as process:
        yield process


def test_all_layouts_hold_and_the_certificate_says_what_was_refused(process, tmp_path):
    certificate, lines = process.submit(verified_matrix, FEW, 2).result()
    assert [row.layout for row in certificate.layouts] == LAYOUTS
    assert certificate.holds, [*certificate.lines()]
    assert lines[0] == f"{len(certificate.layouts)} layouts of up to 2 ranks"
    assert lines[1:] == [row.line for row in certificate.layouts] and not certificate.left
    assert all(row.error <= row.bound and row.quantity for row in certificate.layouts)
    assert certificate.layouts[0].ranks == 1 and certificate.layouts[1].ranks == 2
    assert certificate.layouts[2].flags[-2:] == ["--parallel.data=2", "--deepspeed.zero_optimization.stage=1"]
    assert {"parallel.tensor", "parallel.pipeline", "training.sequence_length"} <= certificate.refused.keys()
    assert any(line.startswith("refused: ") for line in certificate.lines())
    text = certificate.write(tmp_path / "all.json")
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["holds"] and len(written["layouts"]) == 5 and "all hold" in text.read_text()


def test_it_goes_on_after_layouts_that_depart_or_die(process):
    fault = "missing sum over data-parallel ranks"
    certificate, _ = process.submit(verified_matrix, FEW, 2, fault, dying="ZeRO 1").result()
    assert [row.layout for row in certificate.layouts] == LAYOUTS
    failed = {row.layout: row.departure for row in certificate.failed}
    assert "data 2" in failed and "one rank" not in failed and not certificate.holds
    assert failed["data 2"].startswith("gradient of lm_head.weight")
    assert "this rank dies" in failed["data 2, ZeRO 1"]


def test_a_layout_that_this_machine_cannot_train_is_refused(process):
    """DeepSpeed has no fp16 on a CPU; Gemma's weights begin at zero, and fp16 rounds their first values coarsely."""
    narrow = {**FEW, "model.family": "gemma3_text", "training.precision": "fp16"}
    certificate, _ = process.submit(verified_matrix, narrow, 2, precision="run").result()
    zero = [name for name in LAYOUTS if "ZeRO" in name]
    assert zero and [row.layout for row in certificate.layouts] == [
        each for each in LAYOUTS if each not in zero
    ]
    assert certificate.holds, [*certificate.lines()]
    assert certificate.refused["training.precision"]["layouts"] == len(zero)


def test_a_run_that_this_machine_cannot_train_is_an_error(process):
    own = {"training.precision": "fp16", "parallel.data": 2, "deepspeed.zero_optimization.stage": 1}
    with pytest.raises(ConfigError):  # its text does not survive the way between processes
        process.submit(verified_matrix, {**FEW, **own}, 2, precision="run").result()


def test_ctrl_c_leaves_what_was_done(process):
    certificate, lines = process.submit(verified_matrix, FEW, 2, stopped_after=2).result()
    assert (
        [row.layout for row in certificate.layouts]
        == LAYOUTS[:2]
        == [line.split("  ")[0] for line in lines[1:3]]
    )
    assert certificate.left == LAYOUTS[2:] and not certificate.holds and not certificate.failed
    assert any(
        "not verified, because it was stopped: 3, from data 2, ZeRO 1" in line for line in certificate.lines()
    )


def test_the_command_prints_a_table_and_writes_the_certificate(tmp_path):
    flags = flags_of(FEW)
    (tmp_path / "run.toml").write_text("")
    command = [sys.executable, "-m", "megalite", "verify", "run.toml", "--matrix", "1", "--json", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["holds"] and [row["layout"] for row in document["layouts"]] == ["one rank"]
    assert "1 layout of up to 1 rank: all hold" in done.stderr
    assert json.loads((tmp_path / "run.verify.json").read_text())["layouts"] == document["layouts"]
    assert "one rank" in (tmp_path / "run.verify.txt").read_text()
