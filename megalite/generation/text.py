"""Continue a text with a loaded model: `megalite.generate`."""

from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack, overload

from megalite.errors import ConfigError, Problem
from megalite.generation.batch_engine import BatchEngine, Event
from megalite.generation.loaded import LoadedModel as LoadedModel
from megalite.generation.loaded import load_source as load_source
from megalite.generation.prompts import prompt_ids
from megalite.generation.request import Request, Sampling, check_request, sampling_problems


class SamplingValues(TypedDict, total=False):
    """The settings of `Sampling`, by name; None: the default."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int


_AT_ONCE = 16


@overload
def generate(
    loaded: LoadedModel,
    prompt: str,
    *,
    tokens: int = ...,
    stop: Sequence[str] = ...,
    adapter: str | None = ...,
    **sampling: Unpack[SamplingValues],
) -> str: ...


@overload
def generate(
    loaded: LoadedModel,
    prompt: list[str] | tuple[str, ...],
    *,
    tokens: int = ...,
    stop: Sequence[str] = ...,
    adapter: str | None = ...,
    **sampling: Unpack[SamplingValues],
) -> list[str]: ...


def generate(
    loaded: LoadedModel,
    prompt: str | list[str] | tuple[str, ...],
    *,
    tokens: int = 64,
    stop: Sequence[str] = (),
    adapter: str | None = None,
    **sampling: Unpack[SamplingValues],
) -> str | list[str]:
    """Return the prompt and its continuation, the text that `megalite generate` prints; for a list, a list in order.

    The prompts of a list share the forwards of the model, up to 16 at a time, and have the same settings.

    tokens: the maximum number of new tokens; the end of a document or of an answer ends the text before.
    stop: strings that end the text before them. adapter: the name of one of the adapters that the model was loaded
    with.
    sampling: temperature (0: the most likely token); top_k: sample from the k most likely tokens; top_p: from the
    fewest tokens with that total probability; min_p: from the tokens that are at least min_p times as likely as the
    most likely one; seed (0): equal seeds give equal texts; penalties: see `megalite.generation.request.Sampling`.
    Raises ConfigError for a wrong value, with all of them, and if prompt and new tokens exceed the model's positions.
    """
    if unknown := sampling.keys() - SamplingValues.__annotations__:
        raise TypeError(f"generate() got an unexpected keyword argument {unknown.pop()!r}")
    if problems := list(sampling_problems(tokens, sampling, stop=stop)):
        raise ConfigError(problems, "the request")
    stops, prompts = loaded.stops, [prompt] if isinstance(prompt, str) else list(prompt)
    requests = [
        Request(
            tuple(prompt_ids(loaded.tokenizer, text)),
            tokens,
            Sampling.of(sampling),
            stops.ids,
            (*stop, *stops.texts),
            adapter=adapter,
        )
        for text in prompts
    ]
    if isinstance(prompt, str):
        return prompt + "".join(event.text for event in stream(loaded, requests[0]))
    return [text + new for text, new in zip(prompts, _new_texts(loaded, requests), strict=True)]


def _new_texts(loaded: LoadedModel, requests: Sequence[Request]) -> list[str]:
    """Return the new text of each request; ConfigError, with the number of the prompt, if one can never run."""
    if not requests:
        return []
    for number, request in enumerate(requests):
        try:
            check_request(request, loaded.config, loaded.config.longest_sequence, loaded.source.adapters)
        except ConfigError as error:
            problems = [
                Problem(f"prompt[{number}]", f"{each.key}: {each.message}", each.remedy)
                for each in error.problems
            ]
            raise ConfigError(problems, "the request") from None
    longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
    engine = BatchEngine(loaded, max_requests=min(len(requests), _AT_ONCE), max_tokens=longest)
    texts = {engine.submit(request): "" for request in requests}
    while engine.has_work:
        for event in engine.step():
            texts[event.number] += event.text
    return list(texts.values())


def stream(loaded: LoadedModel, request: Request) -> Iterator[Event]:
    """Yield the events of one request as they come, on every rank of the model's mesh alike. Raises ConfigError."""
    check_request(request, loaded.config, loaded.config.longest_sequence, loaded.source.adapters)
    engine = BatchEngine(loaded, max_requests=1, max_tokens=len(request.prompt_ids) + request.max_tokens)
    engine.submit(request)
    while engine.has_work:
        yield from engine.step()
