"""Computations of the model that rank 0 asks for and every rank takes part in."""

from collections.abc import Callable
from typing import Any

from megalite.generation.loaded import LoadedModel


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
