"""Contexts and continuations become the tokens and windows that are scored."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.evaluate import encoding
from megalite.evaluate.encoding import TextEncoder

TOKENS = ["</s>", "a", "b", "c", " ", "ab", " c", "bc"]
MERGES = [("a", "b"), (" ", "c"), ("b", "c")]


@pytest.fixture
def encoder(tmp_path: Path) -> TextEncoder:
    """Merges "a" with "b", and a space with "c"."""
    vocabulary = {token: place for place, token in enumerate(TOKENS)}
    Tokenizer(models.BPE(vocabulary, MERGES, unk_token="</s>")).save(str(tmp_path / "tokenizer.json"))
    return TextEncoder(load_tokenizer(tmp_path / "tokenizer.json", end_of_document="</s>"))


def words(ids: list[int]) -> list[str]:
    return [TOKENS[each] for each in ids]


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("ca", "b", (["c", "a"], ["b"])),
        ("a", "b", (["a"], ["b"])),
        ("b c", "a", (["b", " c"], ["a"])),
        ("b ", "c", (["b"], [" c"])),
        ("a", "bc", (["ab"], ["c"])),
        ("", "ab", (["</s>"], ["ab"])),
    ],
)
def test_a_continuation_has_tokens_of_its_own(
    encoder: TextEncoder, context: str, continuation: str, expected: tuple[list[str], list[str]]
) -> None:
    of_context, of_continuation = encoder.pair(context, continuation)
    assert (words(of_context), words(of_continuation)) == expected


@pytest.mark.parametrize("length", [5, 3, 6, 9])
def test_a_cut_context_leaves_the_targets(length: int) -> None:
    context, continuation = [10, 11, 12, 13], [20, 21, 22]
    window = encoding.pair_window(context, continuation, length)
    assert window.targets.tolist() == continuation
    assert window.inputs.tolist() == [*context, 20, 21][-length:]
