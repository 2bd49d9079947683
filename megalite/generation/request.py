"""A generation request, its sampling settings and the rules over them. No torch."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megalite.config.sections.shape_settings import longest_sequence_setting
from megalite.errors import ConfigError, Problem
from megalite.topology.shape import ModelShape

# The most alternatives of a token that a request may ask for, as of the OpenAI API.
MOST_LOGPROBS = 20


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled.

    temperature: 0 is greedy. top_k: sample from the k most likely tokens; 0: all. top_p: sample from the fewest tokens
    whose total probability is at least top_p (nucleus sampling, Holtzman et al. 2020). min_p: sample from the tokens
    with at least min_p times the probability of the most likely token; 0: all. seed: random seed.

    The penalties change the logits before everything else, greedy sampling included. repetition_penalty: logits of
    tokens of the prompt or the new text are divided by it if positive, else multiplied (as in transformers); 1: none.
    presence_penalty, frequency_penalty: subtracted from the logits of each new token, once and once per occurrence (as
    in the OpenAI API); the prompt does not count.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Sampling":
        """Return the settings with these values by name; None: the default. Other names do not count."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    @property
    def penalises(self) -> bool:
        """True if the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A text to continue.

    prompt_ids: the tokens before the new ones. max_tokens: the maximum number of new tokens. stop_ids: tokens that end
    the text. stop: strings that end the text, which does not contain them. logprobs: None: no log probabilities; n: of
    each new token and of its n most likely alternatives. json_schema: the new text is JSON of this schema
    (`megalite.generation.json_schema.schema_text`), whose end ends it; cut at max_tokens, it is the beginning of one.
    embeds: no new token: the embedding of the prompt (`megalite.generation.sampling`) is wanted; max_tokens is 0.
    adapter: the name of the adapter that computes the text; None: the model's own weights alone do.
    shown_ids: special tokens that the text shows; it shows no others. scores_prompt: with `logprobs`, log probabilities
    of the prompt's tokens too; max_tokens may then be 0.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    json_schema: str | None = None
    embeds: bool = False
    adapter: str | None = None
    shown_ids: frozenset[int] = frozenset()
    scores_prompt: bool = False


# Setting -> whether a value is right, what is wrong with another one, and the remedy.
_RULES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "tokens": (lambda value: value >= 1, "{} is no number of new tokens", "use 1 or more"),
    "temperature": (lambda value: 0 <= value < math.inf, "{} is not a temperature", "use 0 or more"),
    "top_k": (lambda value: value >= 1, "{} is no number of tokens", "use 1 or more, or leave it out"),
    "top_p": (lambda value: 0 < value <= 1, "{} is not a probability", "use more than 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "{} is not a probability", "use 0 or more and at most 1"),
    "repetition_penalty": (
        lambda value: 0 < value < math.inf,
        "{} is not a factor",
        "use more than 0; 1 is none",
    ),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"),
        (lambda value: -2 <= value <= 2, "{} is not a penalty", "use -2 to 2; 0 is none"),
    ),
    "stop": (all, "has an empty string, which every text contains", "leave it out"),
    "logprobs": (
        lambda value: 0 <= value <= MOST_LOGPROBS,
        "{} is no number of alternatives",
        f"use 0 to {MOST_LOGPROBS}",
    ),
}
_NEED_TEMPERATURE = ("top_k", "top_p", "min_p")


def sampling_problems(
    tokens: int,
    values: Mapping[str, Any],
    name: Callable[[str], str] = str,
    *,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
) -> Iterator[Problem]:
    """Yield the problems of a request.

    values: as of `Sampling.of`. name: how the caller writes a setting, such as `--top-k` for top_k.
    """
    greedy = Sampling.of(values).temperature == 0
    settings = {**values, "tokens": tokens, "stop": stop, "logprobs": logprobs}
    for setting, (is_right, fault, remedy) in _RULES.items():
        if (value := settings.get(setting)) is None:
            continue
        if not is_right(value):
            message = fault.format(f"{value:g}" if isinstance(value, float) else value)
            yield Problem.reset(name(setting), message, remedy)
        if greedy and setting in _NEED_TEMPERATURE:
            yield Problem(
                name(setting),
                f"has no effect with {name('temperature')} 0, which takes the most likely token",
                f"set {name('temperature')} above 0, for example 1",
                {name("temperature"): 1},
            )


def check_request(request: Request, shape: ModelShape, most: int, adapters: Collection[str] = ()) -> None:
    """Raise ConfigError if a request can never run.

    most: the tokens of a request for which the cache has room. adapters: the names of those beside the model.
    """
    prompt, new = request.prompt_ids, request.max_tokens
    setting = f"{longest_sequence_setting(shape)} = {shape.longest_sequence}"
    if most < shape.longest_sequence:
        setting = f"max_tokens = {most}, the cache's room for a request"
    problem = None
    if not prompt:
        problem = Problem("prompt", "is empty", "give at least one character")
    elif not all(0 <= each < shape.vocab_size for each in prompt):
        problem = Problem(
            "prompt",
            f"has id {max(prompt)}, and the model's vocabulary {shape.vocab_size} ids",
            "name the tokenizer that the model was trained with",
        )
    elif len(prompt) + new > most:
        problem = Problem(
            "tokens",
            f"{len(prompt)} tokens of the prompt and {new} new ones exceed {setting}",
            f"use at most {max(0, most - len(prompt))}, or a shorter prompt",
            {"tokens": most - len(prompt)} if len(prompt) < most else {},
        )
    elif new < 1 and not (request.embeds or request.scores_prompt):
        problem = Problem("tokens", f"{new} is no number of new tokens", "use 1 or more")
    elif request.adapter is not None and request.adapter not in adapters:
        known = (
            f"use {' or '.join(adapters)}, or leave it out"
            if adapters
            else "leave it out: no adapter is loaded"
        )
        problem = Problem("adapter", f"{request.adapter!r} is not one of the model's adapters", known)
    elif request.json_schema is not None and request.stop:
        problem = Problem("stop", "may cut the JSON of json_schema", "leave one of them out")
    if problem is not None:
        raise ConfigError([problem], "the request")
