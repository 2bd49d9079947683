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
from megalite.evaluate.answers import TextPrompt, answers
from megalite.evaluate.calls import call_on_ranks, follow, release
from megalite.evaluate.documents import TextSource
from megalite.evaluate.encoding import TextEncoder, pair_windows
from megalite.evaluate.perplexity import TextEvaluation, TextFigures, evaluate_text
from megalite.evaluate.scoring import scores
from megalite.evaluate.windows import Window, rolling_windows
from megalite.generation.loaded import load_source
from megalite.generation.source import find_source
from megalite.generation.stops import NO_STOPS
from megalite.parallel.log_probs import vocab_parallel_log_probs
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.stages import balanced_split
from tests.support.evaluated import (
    Evaluated,
    transformers_answer,
    transformers_choices,
    transformers_loss,
    write_evaluated,
)
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


@pytest.mark.parametrize(
    "layout",
    cases([Layout(context=3), Layout(context=2, pipeline=2, data=2)], core=[Layout(context=3)]),
    ids=str,
)
@pytest.mark.parametrize("window", [37, 64])
def test_context_ranks_score_as_one_process(ranks, evaluated: Evaluated, layout: Layout, window: int) -> None:
    """Neither of 37 and the shorter documents can be cut into equal blocks, nor 64, the model's longest, by 3 ranks."""
    cut = {
        "model": evaluated.run,
        "texts": evaluated.texts,
        "dtype": torch.float64,
        "window": window,
        "stride": 11,
    }
    alone = figures(layout=Layout(), **cut)
    for found in ranks.run(figures, world_size=layout.world_size, layout=layout, **cut):
        assert found.tokens == alone.tokens
        assert_close(found.log_likelihood, alone.log_likelihood, rtol=LAYOUT_RTOL)


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


QUESTIONS = [
    ("the tensor waits for", ["its peers.", "nothing at all, and one rank", "x"]),
    ("das Maß", ["sums the weights.", "a"]),
    ("one rank sends a micro batch.", ["每个阶段", "the gradient divides its peers.", "no", "two"]),
    ("a pipeline", ["waits", "sends", "divides"]),
    ("the gradient sums", ["the weights. " * 9, "a micro batch."]),
]


def likelihoods_and_answers(model: Path, layout: Layout) -> tuple[list[float], list[str]] | None:
    """Return what rank 0 has of its calls; None on the ranks that take part in them."""
    mesh = ParallelMesh.single() if layout.world_size == 1 else ParallelMesh.over_world(layout)
    loaded = load_source(find_source(model), mesh, torch.float64)
    if mesh.rank != 0:
        return follow(loaded)
    encoder, longest = TextEncoder(loaded.tokenizer), loaded.config.longest_sequence
    pairs = [encoder.pair(context, f" {choice}") for context, choices in QUESTIONS for choice in choices]
    windows = [window for pair in pairs for window in pair_windows(*pair, longest)]
    scored = call_on_ranks(loaded, scores, windows, 3)
    prompts = [TextPrompt(context, ("\n",)) for context, _ in QUESTIONS]
    texts = call_on_ranks(loaded, answers, prompts, 9, None, NO_STOPS, 3)
    release(loaded)
    return [score.log_likelihood for score in scored], texts


@pytest.mark.parametrize(
    "layout",
    cases(
        [Layout(), Layout(tensor=2, data=2), Layout(pipeline=2, data=2), Layout(tensor=2, context=2)],
        core=[Layout(tensor=2, data=2)],
    ),
    ids=str,
)
def test_choices_and_answers_are_those_of_a_plain_loop(ranks, evaluated: Evaluated, layout: Layout) -> None:
    export = evaluated.export
    expected = [value for question in QUESTIONS for value in transformers_choices(export, *question)]
    written = [transformers_answer(export, context, 9).partition("\n")[0] for context, _ in QUESTIONS]
    assert any(written)
    (likelihoods, texts), *others = ranks.run(
        likelihoods_and_answers, world_size=layout.world_size, model=evaluated.run, layout=layout
    )
    assert_close(likelihoods, expected, rtol=FLOAT32_RTOL)
    # A text is decoded alone, where the tokenizer may drop the space in front.
    assert [text.lstrip() for text in texts] == [text.lstrip() for text in written]
    assert others == [None] * (layout.world_size - 1)


def log_probs_over_tp(size: int, vocabulary: int) -> tuple[Any, Any]:
    """Log-probabilities of random tokens over tp, half of them the most likely ones."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, vocabulary, generator=generator, dtype=torch.float64) * 30
    labels = torch.randint(vocabulary, (40,), generator=generator)
    labels[::2] = logits[::2].argmax(-1)
    mesh = ParallelMesh.over_world(Layout(tensor=size))
    rows = balanced_split(vocabulary, size)[mesh.tp.rank]
    found = vocab_parallel_log_probs(logits[:, rows.start : rows.stop], labels, rows, mesh.tp)
    expected = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return found, (expected, logits.argmax(-1) == labels)


def test_log_probabilities_over_uneven_shares_of_the_vocabulary(ranks) -> None:
    for (log_probs, greedy), (expected, likeliest) in ranks.run(
        log_probs_over_tp, world_size=3, size=3, vocabulary=101
    ):
        assert_close(log_probs, expected, rtol=LAYOUT_RTOL)
        assert torch.equal(greedy, likeliest) and 0 < int(greedy.sum()) < len(greedy)
