"""Generated answers: the same texts in any batch as one by one."""

from dataclasses import replace

import pytest
import torch

from megalite.evaluate.answers import Wanted, answers
from megalite.evaluate.encoding import TextEncoder
from megalite.generation.engine import generate_ids
from megalite.generation.loaded import LoadedModel, load_source
from megalite.generation.request import GREEDY, Sampling
from megalite.generation.source import find_source
from megalite.parallel.mesh import ParallelMesh
from tests.support.evaluated import write_evaluated
from tests.support.tiny import tiny_corpus

TOKENS = 14


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    run = write_evaluated(tmp_path_factory.mktemp("evaluated")).run
    return load_source(find_source(run), ParallelMesh.single(), torch.float64)


def alone(loaded: LoadedModel, wanted: Wanted) -> str:
    """Generate one text by itself, decode it whole and cut it."""
    tokenizer = loaded.tokenizer
    prompt = TextEncoder(tokenizer).ids(wanted.prompt)[-(loaded.config.longest_sequence - TOKENS) :]
    stop_ids = {tokenizer.end_of_document_id}
    new = generate_ids(loaded.replica, prompt, new_tokens=TOKENS, sampling=wanted.sampling, stop_ids=stop_ids)
    shown = prompt if wanted.continues else []
    before = tokenizer.decode(shown, skip_special_tokens=True)
    text = tokenizer.decode([*shown, *new], skip_special_tokens=True)[len(before) :]
    for stop in wanted.stops:
        text = text.partition(stop)[0]
    return text


def test_texts_are_the_same_in_any_batch(loaded: LoadedModel) -> None:
    corpus = tiny_corpus(12)
    plain = [Wanted(text[: 5 + 17 * at], continues=at % 3 > 0) for at, text in enumerate(corpus)]
    plain = [
        replace(each, sampling=Sampling(1.2, seed=at)) if at % 2 else each for at, each in enumerate(plain)
    ]
    plain.append(Wanted("".join(corpus)))  # longer than the model
    whole = [alone(loaded, each) for each in plain]
    assert len(set(whole)) > 6 and any(each.sampling == GREEDY for each in plain)
    cut = [replace(each, stops=("never", text[3:6])) for each, text in zip(plain, whole, strict=True)]
    for batch_size in (1, 3, 16):
        assert answers(loaded, plain, TOKENS, batch_size=batch_size) == whole
        found = answers(loaded, cut, TOKENS, batch_size=batch_size)
        assert found == [text[: text.index(text[3:6])] if text[3:6] else text for text in whole]
    assert answers(loaded, [], TOKENS) == []
