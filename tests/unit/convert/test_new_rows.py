"""A larger vocabulary than that of the weights: new rows are the mean of the others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.convert.huggingface import load
from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.load import HuggingFaceReader
from megalite.errors import CheckpointError
from megalite.topology.parameters import EMBEDDING, HEAD
from megalite.topology.sharding import TensorSlice
from tests.support.parity import assert_close
from tests.support.tiny import tiny_shape
from tests.unit.convert.exporting import lively_stage, save_stage

ROWS, MORE = 101, 107


@pytest.mark.parametrize("tied", [False, True])
def test_every_region_has_the_files_rows_and_their_mean(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(tiny_shape(tied=tied, layers=2), vocab_size=ROWS)
    stage = lively_stage(shape)
    export(save_stage(tmp_path, shape, stage), tmp_path / "export", None)
    larger, width = replace(shape, vocab_size=MORE), shape.hidden_size
    # The mean is read in many blocks.
    monkeypatch.setattr(load, "BLOCK_ELEMENTS", 7 * width)
    with HuggingFaceReader(tmp_path / "export", larger, more_rows=True) as reader:
        for name in (EMBEDDING,) if tied else (EMBEDDING, HEAD):
            held = dict(stage.named_parameters())[name].detach()
            mean = held.double().mean(dim=0).float()
            expected = torch.cat([held, mean.expand(MORE - ROWS, -1)])
            for first, last in ((0, 54), (54, MORE), (100, 103), (102, 105)):
                found = reader.read("weight", name, TensorSlice((first, 0), (last - first, width)))
                assert_close(found, expected[first:last], rtol=0)


def test_without_added_tokens_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    shape = replace(tiny_shape(tied=False, layers=2), vocab_size=ROWS)
    export(save_stage(tmp_path, shape, lively_stage(shape)), tmp_path / "export", None)
    with pytest.raises(CheckpointError, match=rf"embed_tokens.weight has shape \({ROWS}, "):
        HuggingFaceReader(tmp_path / "export", replace(shape, vocab_size=MORE))
    with pytest.raises(CheckpointError, match=rf"embed_tokens.weight has shape \({ROWS}, "):
        HuggingFaceReader(tmp_path / "export", replace(shape, vocab_size=ROWS - 1), more_rows=True)
