"""Generates the texts behind prompts, in batches, over all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megalite.data.tokenizers.tokenizer import Tokenizer
from megalite.errors import ConfigError, Problem
from megalite.evaluate.encoding import TextEncoder
from megalite.generation.detokenise import Detokeniser, StopScan
from megalite.generation.loaded import LoadedModel
from megalite.generation.request import GREEDY, Request, Sampling, check_request
from megalite.generation.stops import NO_STOPS, Stops
from megalite.generation.token_engine import TokenEngine
from megalite.model.kv_cache import CacheSize
from megalite.monitor.work import working


@dataclass(frozen=True)
class TextPrompt:
    """A text to continue. stops: the continuation ends before the first of these strings."""

    text: str
    stops: tuple[str, ...] = ()
    sampling: Sampling = GREEDY


def answers(
    loaded: LoadedModel,
    prompts: Sequence[TextPrompt],
    tokens: int,
    adds_start: bool | None = None,
    stops: Stops = NO_STOPS,
    batch_size: int = 16,
) -> list[str]:
    """Return the generated texts in order, of at most `tokens` new tokens, on every rank; rank 0 shows the progress.

    A text is decoded alone, as lm_eval does, where many tokenizers drop the space that joins it to the prompt.
    adds_start: as of TextEncoder. stops: what ends a text beside what ends every text of the model.
    Each data-parallel rank generates every n-th, `batch_size` of them at a time; a text does not depend on the others.
    Collective over the world. A prompt that leaves no room for the new tokens loses its beginning. Raises ConfigError
    if the model's positions are fewer than the new tokens.
    """
    mesh, encoder = loaded.replica.mesh, TextEncoder(loaded.tokenizer, adds_start)
    room = loaded.config.longest_sequence - tokens
    if room < 1:
        problem = Problem(
            "max_gen_toks",
            f"{tokens} new tokens leave no room for a prompt in {loaded.config.longest_sequence}",
            f"use at most {loaded.config.longest_sequence // 2}",
        )
        raise ConfigError([problem], "the request")
    indices = range(mesh.batch.rank, len(prompts), mesh.batch.size)
    texts = {
        index: _Text(
            loaded.tokenizer,
            prompts[index],
            (encoder.ids(prompts[index].text) or [encoder.start_id])[-room:],
            (*loaded.stops.texts, *stops.texts),
        )
        for index in indices
    }
    with working("generating", unit="answers", total=len(prompts), shown=mesh.rank == 0) as work:
        if texts:
            _generate(loaded, texts, tokens, loaded.stops.ids | stops.ids, batch_size, work.advance)
    own = [(index, text.value) for index, text in texts.items()]
    values = dict(chain.from_iterable(mesh.gather_objects(own) or []))
    ordered: list[str] = mesh.broadcast_object([values[index] for index in sorted(values)])
    return ordered


class _Text:
    """One text while it is generated, behind the ids of its prompt."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: TextPrompt, ids: Sequence[int], stops: Sequence[str] = ()
    ):
        """stops: strings that end the text beside those of the prompt."""
        self.sampling, self.ids = prompt.sampling, tuple(ids)
        self.value = ""
        self._new = Detokeniser(tokenizer, ())
        self._scan = StopScan([stop for stop in (*prompt.stops, *stops) if stop])

    def push(self, token: int | None, *, last: bool) -> bool:
        """Append a token, the last one or not; return whether a stop string has ended the text. None: an end token."""
        new = ("" if token is None else self._new.push(token)) + (self._new.finish() if last else "")
        text, stopped = self._scan.push(new)
        self.value += text + (self._scan.finish() if last and not stopped else "")
        return stopped


def _generate(
    loaded: LoadedModel,
    texts: Mapping[int, _Text],
    tokens: int,
    stop_ids: frozenset[int],
    batch_size: int,
    advance: Callable[[int], None],
) -> None:
    """Complete the texts; every rank of a copy of the model has the same ones, and takes part."""
    longest = max(len(text.ids) for text in texts.values()) + tokens
    engine = TokenEngine(loaded.replica, CacheSize(min(batch_size, len(texts)), longest))
    for index, text in texts.items():
        request = Request(text.ids, tokens, text.sampling, stop_ids)
        check_request(request, loaded.config, longest)
        engine.submit(index, request)
    while engine.has_work:
        for sampled in engine.step():
            ended = sampled.finish is not None
            # All ranks have the same tokens, so all cancel here.
            token = None if sampled.token in stop_ids else sampled.token
            stopped = texts[sampled.number].push(token, last=ended)
            if stopped and not ended:
                engine.cancel(sampled.number)
            if stopped or ended:
                advance(loaded.replica.mesh.batch.size)
