"""The collectives and messages of torch.distributed that a rank on the stand-in accelerator issues to its streams."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.support.hardware_queues import Issued, Meeting

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
MESSAGES = ("irecv", "isend", "recv", "send")


class _Work:
    """The work of a collective or message; notes when the computing stream waits for it."""

    def __init__(self, work: Any, issued: Issued, end: int):
        self._work, self._issued, self._end = work, issued, end

    def wait(self, *arguments: Any) -> Any:
        self._issued.wait(self._end)
        return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def recorded() -> Iterator[Issued]:
    """Record the collectives and messages of this rank on the device; those of the host have no stream."""
    issued = Issued()
    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, _collective(name, issued)))
        for name in MESSAGES:
            patches.enter_context(mock.patch.object(dist, name, _message(name, issued)))
        yield issued


def _collective(operator: str, issued: Issued) -> Callable[..., Any]:
    original = getattr(dist, operator)

    def call(*arguments: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        work = original(*arguments, group=group, async_op=async_op, **options)
        if dist.get_backend(group) == "gloo":
            return work
        name = _name(group)
        end = issued.start(Meeting(f"{operator} in {name}", tuple(dist.get_process_group_ranks(group))), name)
        if async_op:
            return _Work(work, issued, end)
        issued.wait(end)
        return work

    return call


def _message(operator: str, issued: Issued) -> Callable[..., Any]:
    original = getattr(dist, operator)

    def call(
        values: Any,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        *,
        src: int | None = None,
        dst: int | None = None,
    ) -> Any:
        [other] = (each for each in (peer, src, dst) if each is not None)
        result = original(values, other, group, tag=tag)
        here, name = dist.get_rank(), _name(group)
        ranks = (here, other) if operator.endswith("send") else (other, here)
        # A communicator for each pair of a group, with one stream for both directions.
        end = issued.start(Meeting(f"message in {name}", ranks), (name, *sorted(ranks)))
        if operator.startswith("i"):
            return _Work(result, issued, end)
        issued.wait(end)
        return result

    return call


def _name(group: Any) -> str:
    return str((group or dist.group.WORLD).group_name)
