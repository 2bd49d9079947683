"""A larger vocabulary than that of the weights: new rows are the mean of the others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.convert.huggingface import load
from megalite.convert.huggingface.export import export
from megalite.convert.huggingface.load import HuggingFaceReader
from megalite.convert.huggingface.new_rows import NewRows, new_rows
from megalite.data.tokenizers.tokenizer import add_special_tokens, load_tokenizer, save_tokenizer
from megalite.errors import CheckpointError
from megalite.topology.parameters import EMBEDDING, HEAD
from megalite.topology.sharding import TensorSlice
from tests.support.museum import exhibit
from tests.support.parity import assert_close
from tests.support.planted import Planted
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

ROWS, MORE = 101, 107
NEW = NewRows(frozenset(range(ROWS, MORE)), frozenset(range(ROWS)))


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
    with HuggingFaceReader(
        tmp_path / "export", larger, new_rows=NewRows(frozenset(range(ROWS, MORE)), frozenset(range(ROWS)))
    ) as reader:
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
        HuggingFaceReader(
            tmp_path / "export",
            replace(shape, vocab_size=ROWS - 1),
            new_rows=NewRows(frozenset(), frozenset()),
        )


def at_the_end(_: object) -> Callable[..., list[int]]:
    return lambda self, start, count: [
        row - start for row in range(ROWS - len(self.added), ROWS) if start <= row < start + count
    ]


@exhibit(
    "LlamaFactory PR#10547",
    subject="tokenizers",
    there="an embedding with more rows than tokens got the rows of added tokens at its end, not at their ids",
    here="the rows of added tokens are those of their ids, in the padding too, and begin as the mean",
    fault=Planted("megalite.convert.huggingface.new_rows:NewRows.added_in", at_the_end),
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [ROWS, ROWS + 2], ids=["as large", "larger"])
def test_new_tokens_in_the_padding_begin_as_the_mean_of_the_tokens_before(
    tmp_path: Path, tied: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """101 rows for 90 tokens: the new ones are 90, 91, 95 and, with a larger vocabulary, the rows that it lacks."""
    shape = replace(tiny_shape(tied=tied, layers=2), vocab_size=ROWS)
    stage = lively_stage(shape)
    export(save_stage(tmp_path, shape, stage), tmp_path / "export", None)
    width, used = shape.hidden_size, frozenset(range(90)) - {7}
    monkeypatch.setattr(load, "BLOCK_ELEMENTS", 7 * width)
    new = NewRows(frozenset({90, 91, 95, *range(ROWS, rows)}), used)
    with HuggingFaceReader(tmp_path / "export", replace(shape, vocab_size=rows), new_rows=new) as reader:
        for name in (EMBEDDING,) if tied else (EMBEDDING, HEAD):
            held = dict(stage.named_parameters())[name].detach()
            mean = held[sorted(used)].double().mean(dim=0).float()
            expected = torch.cat([held, mean.expand(rows - ROWS, -1)])
            expected[[90, 91, 95]] = mean
            for first, last in ((0, rows), (0, 51), (51, rows), (91, 93), (95, 96), (92, 95)):
                found = reader.read("weight", name, TensorSlice((first, 0), (last - first, width)))
                assert_close(found, expected[first:last], rtol=0)


def test_new_are_the_tokens_that_the_tokenizer_of_the_weights_lacks(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path))
    weights, path, larger = (tmp_path / name for name in ("weights", "path", "larger"))
    for folder in (weights, path, larger):
        save_tokenizer(tokenizer.backend, folder)
    add_special_tokens(path, ["<a>"])
    add_special_tokens(larger, ["<a>", "<b>"])
    run, size = load_tokenizer(larger), tokenizer.vocab_size
    names = ["<a>", "<b>", "<|endoftext|>"]
    assert new_rows(run, [], [weights]) is None
    for sources, added in (([weights, path], {size, size + 1}), ([tmp_path / "none", path], {size + 1})):
        assert new_rows(run, names, sources) == NewRows(
            frozenset(added), frozenset(range(size + 2)) - frozenset(added)
        )
    # A converted vocabulary has no tokenizer.json: what is not the model's own is new.
    known = run.backend.get_vocab(with_added_tokens=False)
    found = new_rows(run, names, [])
    assert found is not None and found.added == {
        run.backend.token_to_id(name) for name in names if name not in known
    }
