"""How much work a function does, counted rather than timed."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def python_calls(function: Callable[[], object]) -> int:
    """Call a function and return how many Python functions were entered meanwhile, in this thread."""
    entered = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered


class _Kernels(TorchDispatchMode):
    """Counts the operators that run on tensors: those that neither allocate nor return a view."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def kernels(function: Callable[[], object]) -> Counter[str]:
    """Call a function and return how often each of torch's operators ran meanwhile: on a card, a launch or more."""
    with _Kernels() as mode:
        function()
    return mode.counts


class _Memory(TorchDispatchMode):
    """Keeps every tensor that an operator returns, so that no address is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.returned += [each for each in tree_iter(made) if isinstance(each, Tensor)]
        return made


def new_bytes(function: Callable[[], object], inputs: Iterable[Tensor]) -> int:
    """Call a function and return how many bytes torch's operators allocated meanwhile for tensors other than these."""
    with _Memory() as mode:
        function()
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, mode.returned)
    }
    return sum(storages.values()) - sum(storages.get(each.untyped_storage().data_ptr(), 0) for each in inputs)
