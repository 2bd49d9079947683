"""Exact match of generated answers, as lm_eval compares those of GSM8K."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.evaluate.answers import Wanted, answers
from megalite.evaluate.few_shot import FewShot
from megalite.evaluate.forms import MARK
from megalite.evaluate.questions import OpenQuestion
from megalite.evaluate.scoring import Advance, ignore
from megalite.evaluate.statistics import Rate
from megalite.generation.loaded import LoadedModel

_STOPS = ("Question:",)
_MARKED = re.compile(rf"{MARK} (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = re.compile(r"[,$]|\.$")


@dataclass(frozen=True)
class MatchFigures:
    """exact_match: the last number of the text is the answer; strict_match: the number behind "####" is.

    For answers without a number, the first line of the text is compared, by both.
    """

    questions: int
    exact_match: Rate
    strict_match: Rate


def exact_match(
    loaded: LoadedModel,
    questions: Sequence[OpenQuestion],
    few_shot: FewShot,
    tokens: int,
    batch_size: int,
    advance: Advance = ignore,
) -> MatchFigures:
    """Generate greedily and compare; the same figures on every rank. Collective over the world.

    batch_size: answers that are generated at a time, by each copy of the model.
    """
    wanted = [Wanted(few_shot.prompt(question, number), _STOPS) for number, question in enumerate(questions)]
    texts = answers(
        loaded,
        wanted,
        tokens,
        few_shot.encoder(loaded.tokenizer),
        stops=few_shot.stops,
        batch_size=batch_size,
        advance=advance,
    )
    last = [float(matches(text, question.final)) for text, question in zip(texts, questions, strict=True)]
    strict = [
        float(matches(text, question.final, strict=True))
        for text, question in zip(texts, questions, strict=True)
    ]
    return MatchFigures(len(questions), Rate.of(last), Rate.of(strict))


def matches(text: str, final: str, *, strict: bool = False) -> bool:
    """Return whether a generated text ends in the final answer."""
    wanted = _number(final)
    if not re.fullmatch(r"-?[0-9.]+", wanted):
        return text.strip().partition("\n")[0].strip() == final
    found = _MARKED.findall(text)[:1] if strict else _NUMBER.findall(text)[-1:]
    return bool(found) and _number(found[0]) == wanted


def _number(text: str) -> str:
    """Return a number without what does not count: commas, the dollar sign, a full stop."""
    return _IGNORED.sub("", text.strip())
