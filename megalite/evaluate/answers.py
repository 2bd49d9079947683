"""Generates the answers to open questions and the bodies of functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.errors import ConfigError, Problem
from megalite.evaluate.encoding import TextEncoder
from megalite.generation.engine import generate_ids
from megalite.generation.loaded import LoadedModel
from megalite.generation.request import GREEDY, Sampling


@dataclass(frozen=True)
class Wanted:
    """One text to generate.

    stops: the text ends before the first of these strings. continues: the text has the space that joins it to the
    prompt; False: it is decoded alone, as lm_eval does, where many tokenizers drop that space.
    """

    prompt: str
    stops: tuple[str, ...] = ()
    sampling: Sampling = GREEDY
    continues: bool = True


def answers(
    loaded: LoadedModel, wanted: Sequence[Wanted], tokens: int, encoder: TextEncoder | None = None
) -> list[str]:
    """Return the generated texts in order, of at most `tokens` new tokens, on every rank.

    Each data-parallel rank generates every n-th. Collective over the world. A prompt that leaves no room for the new
    tokens loses its beginning. Raises ConfigError if the model's positions are fewer than the new tokens.
    """
    mesh, encoder = loaded.replica.mesh, encoder or TextEncoder(loaded.tokenizer)
    own = [
        (index, _answer(loaded, wanted[index], tokens, encoder))
        for index in range(mesh.batch.rank, len(wanted), mesh.batch.size)
    ]
    found = dict(each for part in mesh.gather_objects(own) or [] for each in part)
    texts: list[str] = mesh.broadcast_object([found[index] for index in sorted(found)])
    return texts


def _answer(loaded: LoadedModel, wanted: Wanted, tokens: int, encoder: TextEncoder) -> str:
    """Return one generated text; every rank of a copy of the model takes part."""
    tokenizer, room = loaded.tokenizer, loaded.config.longest_sequence - tokens
    if room < 1:
        problem = Problem(
            "--tokens",
            f"{tokens} new tokens leave no room for a prompt in {loaded.config.longest_sequence}",
            f"use at most {loaded.config.longest_sequence // 2}",
        )
        raise ConfigError([problem], "the request")
    prompt = (encoder.ids(wanted.prompt) or [encoder.start_id])[-room:]
    shown = prompt if wanted.continues else []
    before = tokenizer.decode(shown, skip_special_tokens=True)
    new: list[int] = []
    text = ""
    stop_ids = {tokenizer.end_of_document_id}
    for token in generate_ids(
        loaded.replica, prompt, new_tokens=tokens, sampling=wanted.sampling, stop_ids=stop_ids
    ):
        new.append(token)
        text = tokenizer.decode([*shown, *new], skip_special_tokens=True)[len(before) :]
        # All ranks have the same tokens, so all stop here.
        if any(stop in text for stop in wanted.stops):
            break
    return until(text, wanted.stops)


def until(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the strings."""
    for stop in stops:
        text = text.partition(stop)[0] if stop else text
    return text
