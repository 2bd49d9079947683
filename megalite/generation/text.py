"""Continue a text with a loaded model: `megalite.generate`."""

from collections.abc import Iterator, Sequence

from megalite.errors import ConfigError
from megalite.generation.batch_engine import BatchEngine, Event
from megalite.generation.loaded import LoadedModel as LoadedModel
from megalite.generation.loaded import load_source as load_source
from megalite.generation.prompts import prompt_ids
from megalite.generation.request import Request, Sampling, check_request, sampling_problems


def generate(
    loaded: LoadedModel,
    prompt: str,
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    adapter: str | None = None,
) -> str:
    """Return the prompt and its continuation, the text that `megalite generate` prints.

    tokens: the maximum number of new tokens; the end of a document or of an answer ends the text before.
    temperature: 0 takes the most likely token. top_k: sample from the k most likely tokens. top_p: sample from the
    fewest tokens with that total probability. min_p: sample from the tokens that are at least min_p times as likely as
    the most likely one.
    Penalties: see `megalite.generation.request.Sampling`. stop: strings that end the text before them. seed: equal
    seeds give equal texts. adapter: the name of one of the adapters that the model was loaded with.
    Raises ConfigError for a wrong value, with all of them, and if prompt and new tokens exceed the model's positions.
    """
    values = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    if problems := list(sampling_problems(tokens, values, stop=stop)):
        raise ConfigError(problems, "the request")
    stops = loaded.stops
    request = Request(
        tuple(prompt_ids(loaded.tokenizer, prompt)),
        tokens,
        Sampling.of(values),
        stops.ids,
        (*stop, *stops.texts),
        adapter=adapter,
    )
    return prompt + "".join(event.text for event in stream(loaded, request))


def stream(loaded: LoadedModel, request: Request) -> Iterator[Event]:
    """Yield the events of one request as they come, on every rank of the model's mesh alike. Raises ConfigError."""
    check_request(request, loaded.config, loaded.config.longest_sequence, loaded.source.adapters)
    engine = BatchEngine(loaded, max_requests=1, max_tokens=len(request.prompt_ids) + request.max_tokens)
    engine.submit(request)
    while engine.has_work:
        yield from engine.step()
