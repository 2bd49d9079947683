"""The certificate is bound to the run's settings, is strict JSON, and says where it cannot be written."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config.flags import as_flags
from megalite.config.load import load_run
from megalite.errors import ConfigError
from megalite.verify.certificate import Certificate, config_sha256
from megalite.verify.findings import ORDER, OWN, Departure
from tests.support.file_limit import file_size_limit

CERTIFICATE = Certificate(
    config_sha256="0" * 64,
    layout="tensor 2 x pipeline 1 x data 1",
    axes={"tp": 2},
    ranks=["rank 0 (tp 0)", "rank 1 (tp 1)"],
    steps=2,
    precision="fp64",
    full_size=False,
    bounds=dict.fromkeys(ORDER, 1e-10),
    worst={OWN: {"error": 0.5, "allowed": 1e-10, "name": "w", "step": 1, "tensors": 3, "values": 9}},
    departures=[],
    copies="",
    documents=0,
    leaks=[],
    changed=["model.hidden_size: 4096 -> 64"],
    unchecked=["several hosts"],
    operators={},
    kernels="reference",
    device="cpu",
)
MISSING = Departure(1, OWN, "w", (), math.inf, 1e-10, note="no rank has 6 of its 6 values")


def hash_of(**run: Any) -> str:
    settings: dict[str, dict[str, Any]] = {
        "model": {"preset": "llama-3.1-8b"},
        "training": {"steps": 5, "sequence_length": 64, "micro_batch_size": 1, "global_batch_size": 1},
        "data": {"source": "book.txt"},
        "run": run,
    }
    return config_sha256(load_run(None, as_flags(settings)).config)


def test_the_hash_changes_with_every_setting_but_the_folder() -> None:
    assert hash_of(folder="a") == hash_of(folder="b") != hash_of(seed=7)


def test_a_departure_is_told_in_one_sentence_and_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    assert CERTIFICATE.holds and CERTIFICATE.departure == ""
    found = replace(CERTIFICATE, departures=[MISSING])
    text = found.write(tmp_path / "proof.json").read_text()
    document = json.loads((tmp_path / "proof.json").read_text(), parse_constant=pytest.fail)
    assert not document["holds"] and document["departures"][0]["error"] is None
    assert "gradient before the sum of w, step 1, after the backward: no rank has 6" in document["departure"]
    assert (
        text.startswith("departs: ") and "model.hidden_size: 4096 -> 64" in text and "several hosts" in text
    )
    wrong = replace(MISSING, ranks=(1,), error=0.25, place=(1, 2), value=1.0, expected=0.5, ulps=8.0, note="")
    told = replace(CERTIFICATE, departures=[wrong]).departure
    assert "on rank 1 (tp 1): relative error 2.5e-01, allowed 1e-10; 1.0 at [1, 2], not 0.5: 8 ulp" in told


def test_copies_that_differ_and_documents_that_leak_do_not_hold() -> None:
    assert "copies" in replace(CERTIFICATE, copies="w on ranks [1]").departure
    leak = replace(CERTIFICATE, leaks=["the loss at token 3 of sample 0 changes with another document"])
    assert not leak.holds and "token 3" in leak.departure


def test_a_certificate_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output"):
        CERTIFICATE.write(tmp_path / "file" / "proof.json")


@pytest.mark.parametrize("size", [20, 1400])
def test_a_full_disk_leaves_the_certificate_that_was_there(tmp_path: Path, size: int) -> None:
    """The second time the JSON is written, and its text is not."""
    text = CERTIFICATE.write(tmp_path / "proof.json")
    before = {file: file.read_text() for file in tmp_path.iterdir()}
    longer = replace(CERTIFICATE, changed=["x" * 200] * 3)
    with file_size_limit(size), pytest.raises(ConfigError, match="limit of file sizes"):
        longer.write(tmp_path / "proof.json")
    assert {file: file.read_text() for file in tmp_path.iterdir()} == before and len(before[text]) < 1400
