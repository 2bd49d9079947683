"""The figures of `megalite evaluate` in each layout are transformers' on the export."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.evaluate import perplexity
from megalite.evaluate.documents import TextSource
from megalite.evaluate.perplexity import TextEvaluation, TextFigures, evaluate_text
from megalite.evaluate.windows import Window, rolling_windows
from megalite.generation.source import find_source
from megalite.generation.text import load_source
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from tests.support.evaluated import Evaluated, transformers_loss, write_evaluated
from tests.support.parity import FLOAT32_RTOL, LAYOUT_RTOL, assert_close, relative_error
from tests.support.selection import cases

WINDOW, STRIDE = 40, 13
LAYOUTS = [
    Layout(tensor=tensor, pipeline=pipeline, data=data)
    for tensor in (1, 2)
    for pipeline in (1, 2)
    for data in (1, 2)
]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return write_evaluated(tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(scope="module")
def theirs(evaluated: Evaluated) -> tuple[float, int]:
    return transformers_loss(evaluated.export, evaluated.documents(), window=WINDOW, stride=STRIDE)


def figures(
    model: Path, texts: Path, layout: Layout, dtype: torch.dtype, fault: bool = False, **settings: Any
) -> TextFigures:
    mesh = ParallelMesh.single() if layout.world_size == 1 else ParallelMesh.over_world(layout)
    loaded = load_source(find_source(model), mesh, dtype)
    cut = {"window": WINDOW, "stride": STRIDE} | settings
    request = TextEvaluation(TextSource((str(texts),)), batch_size=3, **cut)
    if fault:
        with patch.object(perplexity, "rolling_windows", context_counted_twice):
            return evaluate_text(loaded, request)
    return evaluate_text(loaded, request)


@pytest.mark.parametrize("layout", cases(LAYOUTS, core=[LAYOUTS[0], LAYOUTS[-1]]), ids=str)
def test_the_perplexity_is_transformers(
    ranks, evaluated: Evaluated, theirs: tuple[float, int], layout: Layout
) -> None:
    loss, tokens = theirs
    for dtype in (torch.float64, torch.float32):
        alone = figures(evaluated.run, evaluated.texts, Layout(), dtype)
        for found in ranks.run(
            figures,
            world_size=layout.world_size,
            model=evaluated.run,
            texts=evaluated.texts,
            layout=layout,
            dtype=dtype,
        ):
            assert found.tokens == tokens
            assert_close(found.perplexity, math.exp(loss / tokens), rtol=FLOAT32_RTOL, what=str(dtype))
            if dtype == torch.float64:
                assert_close(found.log_likelihood, alone.log_likelihood, rtol=LAYOUT_RTOL)
    text = evaluated.documents()
    words = sum(len(re.split(r"\s+", each)) for each in text)
    size = sum(len(each.encode()) for each in text)
    assert (found.documents, found.words, found.bytes) == (len(text), words, size)
    assert_close(found.word_perplexity, math.exp(loss / words), rtol=FLOAT32_RTOL)
    assert_close(found.byte_perplexity, math.exp(loss / size), rtol=FLOAT32_RTOL)
    assert_close(found.bits_per_byte, loss / size / math.log(2), rtol=FLOAT32_RTOL)


def test_without_overlap_and_from_the_export(evaluated: Evaluated) -> None:
    loss, tokens = transformers_loss(evaluated.export, evaluated.documents(), window=64, stride=64)
    for model in (evaluated.run, evaluated.export):
        found = figures(model, evaluated.texts, Layout(), torch.float64, window=64, stride=64)
        assert found.tokens == tokens
        assert_close(found.perplexity, math.exp(loss / tokens), rtol=FLOAT32_RTOL, what=str(model))


def context_counted_twice(*args: Any, **settings: Any) -> Iterator[Window]:
    """Windows that score their context too, which the window before has scored."""
    for window in rolling_windows(*args, **settings):
        own = len(window.inputs) - len(window.targets)
        yield Window(window.inputs, [*window.inputs[1 : own + 1], *window.targets], None)


def test_tokens_that_are_counted_twice_are_seen(evaluated: Evaluated, theirs: tuple[float, int]) -> None:
    loss, tokens = theirs
    found = figures(evaluated.run, evaluated.texts, Layout(), torch.float64, fault=True)
    assert found.tokens > tokens
    assert relative_error(found.perplexity, math.exp(loss / tokens)) > FLOAT32_RTOL
