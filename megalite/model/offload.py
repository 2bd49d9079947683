"""Saved tensors of an accelerator's layers in host memory, from a chunk's forward until its backward needs them.

They leave on one stream while later layers compute, and return on another before their layer's backward. After Rhu et
al., "vDNN", 2016; for one long sequence: Bekman et al., "Arctic long sequence training", 2025.
"""

from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: a copy would take longer to start than to run."""
_LEAVING = 4  # storages on their way out, which still take memory of the device
_AHEAD = 4  # storages on their way back before they are used


class _Streams(NamedTuple):
    """The streams of the copies of one device: a link carries both directions at once."""

    out: torch.Stream
    back: torch.Stream

    @classmethod
    def of(cls, device: torch.device) -> "_Streams":
        return cls(torch.Stream(device), torch.Stream(device))


class _HostStorage:
    """A storage of the device in pinned host memory. users: the saved tensors that have yet to be read."""

    def __init__(self, flat: Tensor, streams: _Streams):
        """flat: the whole storage, one-dimensional."""
        self.users, self._streams, self._device = 0, streams, flat.device
        self._source: Tensor | None = flat
        self._returned: Tensor | None = None
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        streams.out.wait_stream(torch.accelerator.current_stream(flat.device))
        with streams.out:
            self._host.copy_(flat, non_blocking=True)
            self._left = streams.out.record_event()

    def leave(self) -> None:
        """Free the device's memory, once the copy is made; the device waits, not the host."""
        torch.accelerator.current_stream(self._device).wait_event(self._left)
        self._source = None

    def fetch(self) -> None:
        """Start to copy the storage back, unless it is there or on its way."""
        if self._source is None and self._returned is None and self.users:
            with self._streams.back:
                self._streams.back.wait_event(self._left)
                self._returned = self._host.to(self._device, non_blocking=True)
                self._arrived = self._streams.back.record_event()

    def read(self) -> Tensor:
        """Return the storage for a use on the current stream; after its last one the device's memory is free."""
        self.users = max(self.users, 1)
        self.fetch()
        flat = self._source if self._returned is None else self._returned
        assert flat is not None
        if flat is self._returned:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(self._arrived)
            # The allocator must not reuse the copy stream's memory while this stream reads it.
            flat.record_stream(stream)
        self.users -= 1
        if not self.users:
            self._returned = None
        return flat


class _SavedTensor(NamedTuple):
    """A saved tensor as a view of its storage, the number `place` of its graph."""

    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Known(NamedTuple):
    """A storage that was copied. version: of the tensor then: it may have been written to since."""

    storage: StorageWeakRef
    version: int
    place: int


class OffloadedGraph:
    """The saved tensors of one chunk's layers and one micro batch."""

    def __init__(self, streams: dict[torch.device, _Streams]):
        self._streams = streams
        self._storages: list[_HostStorage] = []
        self._leaving: deque[_HostStorage] = deque()
        # By the address on the device, so that views of one storage, and its uses by many layers, share a copy.
        self._known: dict[int, _Known] = {}

    def saving(self, layer: nn.Module) -> saved_tensors_hooks:
        """Return the context in which what the layer saves is offloaded."""
        return saved_tensors_hooks(partial(self._pack, layer), self._unpack)

    def end(self) -> None:
        """Free the device's memory of all that was copied; after the last layer."""
        while self._leaving:
            self._leaving.popleft().leave()
        self._known.clear()

    @torch.no_grad()
    def _pack(self, layer: nn.Module, tensor: Tensor) -> Tensor | _SavedTensor:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cpu" or storage.nbytes() < LEAST_BYTES or _is_of_a_weight(tensor, layer):
            return tensor
        known = self._known.get(storage.data_ptr())
        if known is None or known.storage.expired() or known.version != tensor._version:
            known = _Known(StorageWeakRef(storage), tensor._version, len(self._storages))
            self._known[storage.data_ptr()] = known
            self._storages.append(self._offloaded(tensor.detach()))
        self._storages[known.place].users += 1
        offset = int(tensor.storage_offset())
        return _SavedTensor(known.place, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _offloaded(self, tensor: Tensor) -> _HostStorage:
        if len(self._leaving) == _LEAVING:
            self._leaving.popleft().leave()
        if tensor.device not in self._streams:
            self._streams[tensor.device] = _Streams.of(tensor.device)
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        copied = _HostStorage(tensor.as_strided((elements,), (1,), 0), self._streams[tensor.device])
        self._leaving.append(copied)
        return copied

    @torch.no_grad()
    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        flat = self._storages[saved.place].read()
        for place in range(saved.place - 1, max(saved.place - 1 - _AHEAD, -1), -1):
            self._storages[place].fetch()
        return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


def _is_of_a_weight(tensor: Tensor, layer: nn.Module) -> bool:
    # ZeRO 3 gives a weight other memory for each use, so its addresses are not known before.
    address = tensor.untyped_storage().data_ptr()
    return any(weight.untyped_storage().data_ptr() == address for weight in layer.parameters())


class ActivationOffload:
    """Makes the graphs of the micro batches, which share the streams of their copies."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, _Streams] = {}

    def graph(self) -> OffloadedGraph:
        return OffloadedGraph(self._streams)
