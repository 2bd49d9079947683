"""The defaults and ranges of request fields that docs/serving.md names."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megalite.serve.schemas import ChatRequest, CompletionRequest, SamplingFields

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"
# field -> default, values that are taken, values that are refused
FIELDS: dict[str, tuple[float, list[float], list[float]]] = {
    "temperature": (1, [0, 2], [-0.1, 2.1]),
    "top_p": (1, [0.1, 1], [0, 1.1]),
    "top_k": (0, [5], [-1]),
    "min_p": (0, [1], [1.1]),
    "presence_penalty": (0, [-2, 2], [-2.1, 2.1]),
    "frequency_penalty": (0, [-2, 2], [-2.1, 2.1]),
    "repetition_penalty": (1, [0.1, 2], [0, 2.1]),
    "n": (1, [128], [129]),
}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "One", **fields})


def documented(field: str) -> str:
    [row] = [line for line in DOCS.read_text().splitlines() if re.match(rf"\|[^|]*`{field}`[^|]*\|", line)]
    return row.split("|")[2].strip()


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_has_the_default_and_the_range_of_the_docs(field: str) -> None:
    default, taken, refused = FIELDS[field]
    assert getattr(completion(), field) == default == float(documented(field).partition(":")[0])
    for value in taken:
        assert getattr(completion(**{field: value}), field) == value
    for value in refused:
        with pytest.raises(ValidationError, match=field):
            completion(**{field: value})


def test_the_limits_of_log_probabilities_and_stops() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    assert completion(logprobs=5).logprobs == 5 and completion().logprobs is None
    assert ChatRequest.model_validate({**chat, "top_logprobs": 20}).top_logprobs == 20
    assert len(completion(stop=["x" * 256] * 16).stop) == 16 and SamplingFields().stop == ()
    for wrong in ({"logprobs": 6}, {"stop": ["x"] * 17}, {"stop": ["x" * 257]}):
        with pytest.raises(ValidationError):
            completion(**wrong)
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({**chat, "top_logprobs": 21})
