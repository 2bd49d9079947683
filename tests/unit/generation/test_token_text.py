"""The texts of single tokens, as log-probabilities show them."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megalite.data.tokenizers.tokenizer import load_tokenizer
from megalite.generation.batch_engine import Event
from megalite.generation.token_text import TokenText
from megalite.serve.token_text import ServedTokenText

SPACE = "\u2581"  # sentencepiece's mark of a space


def sentencepiece_like(folder: Path) -> Path:
    """A tokenizer that drops the space before the first token, as Llama's does."""
    vocab = {each: place for place, each in enumerate(["</s>", "a", SPACE, f"{SPACE}a", f"{SPACE}b"])}
    backend = Tokenizer(models.BPE(vocab, [(SPACE, "a")], unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokens_keep_their_spaces_and_none_is_lost(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_like(tmp_path), end_of_document="</s>")
    assert tokenizer.decode([3]) == "a", "the case that a token alone does not show"
    shown = TokenText(tokenizer)
    event = Event(0, 3, -0.5, ((3, -0.5), (1, -1.5), (2, float("-inf"))), None, text=" a")
    row = json.loads(json.dumps(shown.row(event), allow_nan=False))
    assert row == {
        "id": 3,
        "token": " a",
        "logprob": -0.5,
        "top": [
            {"id": 3, "token": " a", "logprob": -0.5},
            {"id": 1, "token": "a", "logprob": -1.5},
            {"id": 2, "token": " ", "logprob": -9999.0},
        ],
    }
    assert shown.line(event) == "' a' -0.5000   ' a' -0.5000  'a' -1.5000  ' ' -9999.0000"
    served = ServedTokenText(tokenizer).chat(event)
    assert [each["token"] for each in served["top_logprobs"]] == [each["token"] for each in row["top"]]
