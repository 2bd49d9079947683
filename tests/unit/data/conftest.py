"""A small tokenizer for all tests of the data path."""

from pathlib import Path

import pytest

from megalite.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.support.tiny import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(tiny_tokenizer(folder))
