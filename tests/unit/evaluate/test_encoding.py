"""Contexts and continuations become the tokens and windows that are scored."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.evaluate import encoding
from megalite.evaluate.encoding import TextEncoder
from tests.support import reported_faults as faults
from tests.support.museum import exhibit

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


@exhibit(
    "lm-evaluation-harness#1053",
    also=("lm-evaluation-harness#1297", "lm-evaluation-harness PR#4055"),
    subject="evaluation",
    there="an answer that one token held together with the end of its question had no token of its own",
    here="such an answer is encoded alone, and scored",
    fault=faults.MERGED_TOKENS_COUNT_AS_CONTEXT,
)
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


@exhibit(
    "mlx-lm PR#1902",
    also=("lingua#28", "Eval#137"),
    subject="evaluation",
    there="where a question had to be cut to fit, some of its own tokens were scored with the answer",
    here="the window ends with the answer, and its targets are the answer's tokens alone",
    fault=faults.SCORES_REACH_INTO_THE_CONTEXT,
)
@pytest.mark.parametrize("length", [5, 3, 6, 9])
def test_a_cut_context_leaves_the_targets(length: int) -> None:
    context, continuation = [10, 11, 12, 13], [20, 21, 22]
    [window] = encoding.pair_windows(context, continuation, length)
    assert window.targets.tolist() == continuation
    assert window.inputs.tolist() == [*context, 20, 21][-length:]


@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_each_token_of_a_continuation_longer_than_the_model_is_scored_once(length: int) -> None:
    context, continuation = [10, 11], [*range(20, 27)]
    windows = encoding.pair_windows(context, continuation, length)
    assert [token for window in windows for token in window.targets.tolist()] == continuation
    text = [context[-1], *continuation]
    for window in windows:
        first = text.index(window.inputs[0])
        assert window.inputs.tolist() == text[first : first + len(window.inputs)]
        assert text[first + len(window.inputs)] == window.targets[-1] and len(window.inputs) <= length
