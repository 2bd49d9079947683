"""Generated answers: the same texts in any batch as one by one."""

from dataclasses import replace

import pytest
import torch

from megalite.evaluate.answers import TextPrompt, answers
from megalite.evaluate.encoding import TextEncoder
from megalite.generation.loaded import LoadedModel, load_source
from megalite.generation.request import GREEDY, Sampling
from megalite.generation.source import find_source
from megalite.parallel.mesh import ParallelMesh
from tests.support.evaluated import write_evaluated
from tests.support.generation import generate_ids
from tests.support.tiny import tiny_corpus

TOKENS = 14


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    run = write_evaluated(tmp_path_factory.mktemp("evaluated")).run
    return load_source(find_source(run), ParallelMesh.single(), torch.float64)


def alone(loaded: LoadedModel, prompt: TextPrompt) -> str:
    """Generate one text by itself and decode it whole."""
    tokenizer = loaded.tokenizer
    ids = TextEncoder(tokenizer).ids(prompt.text)[-(loaded.config.longest_sequence - TOKENS) :]
    ends = {tokenizer.end_of_document_id}
    new = generate_ids(loaded.replica, ids, new_tokens=TOKENS, sampling=prompt.sampling, stop_ids=ends)
    text: str = tokenizer.decode(list(new), skip_special_tokens=True)
    return text


def test_texts_are_the_same_in_any_batch(loaded: LoadedModel) -> None:
    corpus = tiny_corpus(12)
    plain = [
        TextPrompt(text[: 5 + 17 * at], sampling=Sampling(1.2, seed=at) if at % 2 else GREEDY)
        for at, text in enumerate(corpus)
    ]
    plain.append(TextPrompt("".join(corpus)))  # longer than the model
    whole = [alone(loaded, prompt) for prompt in plain]
    assert len(set(whole)) > 6
    cut = [replace(prompt, stops=("never", text[3:6])) for prompt, text in zip(plain, whole, strict=True)]
    for batch_size in (1, 3, 16):
        assert answers(loaded, plain, TOKENS, batch_size=batch_size) == whole
        stopped = answers(loaded, cut, TOKENS, batch_size=batch_size)
        assert stopped == [text[: text.index(text[3:6])] if text[3:6] else text for text in whole]
    assert answers(loaded, [], TOKENS) == []
