"""Settings of a first run, for texts of every length and every other setting beside them."""

from dataclasses import replace

import pytest

from megalite.config.first_run import STARTER, Starter
from megalite.config.load import load_run

BOOK = Starter("texts/book.txt", characters=1_000_000, words=12_000, documents=1, cores=2)


@pytest.mark.parametrize(
    ("characters", "words", "vocab_size", "sequence_length", "steps"),
    [
        (40, 5, 261, 16, 200),
        (2_000, 200, 437, 16, 200),
        (50_000, 3_000, 512, 128, 200),
        (1_000_000, 12_000, 4096, 256, 810),
        (100_000_000, 80_000, 8192, 256, 1170),
    ],
)
def test_the_settings_fit_the_text(
    characters: int, words: int, vocab_size: int, sequence_length: int, steps: int
) -> None:
    starter = replace(BOOK, characters=characters, words=words)
    loaded = load_run(None, ["--data.source", "book.txt"], starter=starter)
    config = loaded.config
    assert config.tokenizer.vocab_size == vocab_size
    assert config.training.sequence_length == sequence_length
    assert config.training.steps == steps
    assert config.batch.global_batch_size == 16
    assert config.run.folder == "runs/book"
    assert loaded.origin("training.steps") == loaded.origin("tokenizer.vocab_size") == STARTER


@pytest.mark.parametrize("source", ["hf:org/poems.v2", "hf:org/poems@0123abc/small:test", "~/a/poems.txt"])
def test_the_folder_has_the_name_of_the_text(source: str) -> None:
    starter = replace(BOOK, source=source)
    assert load_run(None, ["--data.source", source], starter=starter).config.run.folder == "runs/poems"


def test_more_cores_train_longer_on_a_long_text() -> None:
    long = replace(BOOK, characters=10**9)
    assert long.steps(256) < replace(long, cores=8).steps(256)
    assert BOOK.steps(256) == replace(BOOK, cores=8).steps(256)


def test_other_settings_take_precedence() -> None:
    given = {
        "data.source": "b",
        "data.validation": "c",
        "training.epochs": "2",
        "training.global_batch_size": "8",
        "training.micro_batches": "2",
        "tokenizer.path": "tok",
        "run.folder": "here",
        "model.hidden_size": "64",
    }
    flags = [f"--{name}={value}" for name, value in given.items()]
    config = load_run(None, flags, starter=BOOK).config
    assert (config.training.steps, config.training.epochs) == (None, 2)
    assert (config.tokenizer.vocab_size, config.tokenizer.path) == ("auto", "tok")
    assert (config.batch.global_batch_size, config.batch.micro_batches) == (8, 2)
    assert (config.run.folder, config.model.hidden_size, config.model.num_hidden_layers) == ("here", 64, 4)
    assert config.data.split is None


def test_few_steps_need_little_warm_up() -> None:
    for steps in (1, 2, 9, 60):
        config = load_run(None, ["--data.source", "b", "--training.steps", str(steps)], starter=BOOK).config
        assert config.optimizer.warmup_steps == steps // 10


def test_layouts_of_several_ranks_fit() -> None:
    for flags in (["--parallel.data", "3"], ["--parallel.pipeline", "4"], ["--parallel.tensor", "2"]):
        config = load_run(None, ["--data.source", "b", *flags], starter=BOOK).config
        assert config.batch.global_batch_size == 16 * config.layout.data


@pytest.mark.parametrize(("documents", "split"), [(1, True), (2, False), (99, False), (100, True)])
def test_texts_that_can_be_split_are_validated(documents: int, split: bool) -> None:
    config = load_run(None, ["--data.source", "b"], starter=replace(BOOK, documents=documents)).config
    assert config.data.split == ((0.95, 0.05) if split else None)
    assert bool(config.validation.every and config.validation.samples) == split


def test_a_prepared_pair_has_its_tokenizer() -> None:
    config = load_run(None, ["--data.source", "b"], starter=replace(BOOK, words=None, documents=0)).config
    assert (config.tokenizer.vocab_size, config.data.split) == ("auto", None)
