"""Computations of the model that rank 0 asks for and every rank takes part in."""

from collections.abc import Callable, Sequence
from typing import Any

from megalite.evaluate.answers import TextPrompt, answers
from megalite.evaluate.encoding import TextEncoder
from megalite.evaluate.scoring import Score, scores
from megalite.evaluate.windows import Window
from megalite.generation.loaded import LoadedModel
from megalite.generation.stops import Stops
from megalite.monitor.work import working


def score_windows(loaded: LoadedModel, windows: Sequence[Window], batch_size: int) -> list[Score]:
    """Return the scores of all windows. Collective over the world."""
    shown = loaded.replica.mesh.rank == 0
    with working("scoring", unit="windows", total=len(windows), shown=shown) as work:
        return scores(loaded.replica, windows, batch_size, work.advance)


def generate_answers(
    loaded: LoadedModel,
    prompts: Sequence[TextPrompt],
    tokens: int,
    adds_start: bool | None,
    stops: Stops,
    batch_size: int,
) -> list[str]:
    """Return the text behind each prompt, of at most `tokens` tokens. Collective over the world."""
    encoder, shown = TextEncoder(loaded.tokenizer, adds_start), loaded.replica.mesh.rank == 0
    with working("generating", unit="answers", total=len(prompts), shown=shown) as work:
        return answers(
            loaded, prompts, tokens, encoder, stops=stops, batch_size=batch_size, advance=work.advance
        )


def call_on_ranks(loaded: LoadedModel, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(loaded, *arguments)` on rank 0, while every other rank, in `follow`, calls it too."""
    loaded.replica.mesh.broadcast_object((function, arguments))
    return function(loaded, *arguments)


def follow(loaded: LoadedModel) -> None:
    """Take part in the calls of rank 0 until it has made its last one."""
    while (call := loaded.replica.mesh.broadcast_object(None)) is not None:
        function, arguments = call
        function(loaded, *arguments)


def release(loaded: LoadedModel) -> None:
    """Tell the ranks in `follow` that no call follows; for rank 0."""
    loaded.replica.mesh.broadcast_object(None)
