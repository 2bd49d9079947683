"""An imported checkpoint computes the same as megatron-core's own GPT; needs `megatron-core`."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.foreign import import_folder
from tests.support.megatron_core_model import SHAPES, input_ids
from tests.support.parity import FLOAT32_RTOL, assert_close
from tests.unit.convert.test_megatron import logits_of

ROOT = Path(__file__).parents[3]
NOT_INSTALLED = find_spec("megatron") is None or find_spec("megatron.core") is None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NOT_INSTALLED, reason="megatron-core is not installed")]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, 2) for kind in SHAPES if kind != "one group"),
        ("llama", 4),
        ("gpt2", 4),
        ("one group", 1),
    ],
)
def test_logits_are_those_of_megatron_core(tmp_path: Path, kind: str, ranks: int) -> None:
    command = [sys.executable, "-m", "tests.support.megatron_core_model", str(tmp_path), kind]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    done = import_folder(tmp_path / "iter_0000007", tmp_path / "run")
    assert done.shape == SHAPES[kind] and done.step == 7 and not done.notes
    theirs = torch.load(tmp_path / "logits.pt")[..., :101]
    assert_close(logits_of(done, input_ids()), theirs, rtol=FLOAT32_RTOL)
