"""Keeps the variables of one test's rank out of later tests, which would take themselves for ranks of a launcher."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
