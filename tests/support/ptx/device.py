"""A device that interprets PTX: a .cu file's C interface, whose launches run its kernels on the memory of tensors."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.ptx import parse
from tests.support.ptx.build import compiled
from tests.support.ptx.instructions import known
from tests.support.ptx.machine import Launch, Machine, layout, parameter_places
from tests.support.ptx.memory import Fault, Global

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_TOGETHER = 8192  # threads that are interpreted at once
_INVALID_VALUE, _LAUNCH_FAILURE = 1, 719  # error codes of the CUDA runtime
_Triple = ctypes.POINTER(ctypes.c_uint)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, _Triple, _Triple, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
)
_FITS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_size_t)


def _passed(argument: object) -> object:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, torch.dtype):
        return ctypes.c_int(_DTYPES[argument])
    if isinstance(argument, int | float):
        return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_double(argument)
    return argument


def unknown_forms(kernel: parse.Kernel) -> set[str]:
    """Return the instruction forms of a kernel that the interpreter does not execute."""
    return {each.form for each in kernel.code if not known(each)}


@dataclass
class Device:
    """csrc/cuda/<name>.cu on a chip of compute capability `capability` / 10, compiled for compute_<arch>.

    order, late_copies, unwritten: see Launch. watched: whether races are faults. chosen: the only blocks of a launch
    that run. most_shared: limit of shared memory per block in bytes; None: the chip's limit. broken: a function that
    changes the PTX to plant a fault.

    Calls raise Fault for actions that a GPU refuses or leaves undefined.
    """

    name: str
    arch: int | str = 80
    capability: int = 80
    order: Sequence[int] | None = None
    late_copies: bool = True
    unwritten: int | None = None
    watched: bool = True
    chosen: Callable[[Launch], Sequence[int]] | None = None
    broken: Callable[[str], str] | None = None
    most_shared: int | None = None
    launched: list[tuple[str, Launch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        text, library = compiled(self.name, self.arch)
        self.module = parse.parse(text if self.broken is None else self.broken(text))
        self._library = ctypes.CDLL(str(library))
        self._callbacks = _LAUNCH(self._launch), _FITS(self._fits)
        self._kernels: dict[str, parse.Kernel] = {}
        self._allocations: list[tuple[int, int]] = []
        self._failed: Exception | None = None

    def call(self, function: str, *arguments: object, touched: Sequence[Tensor] = ()) -> int:
        """Call a C function on a stream of this device and return its result.

        Tensors are passed as addresses, None as null, int as int64_t, float as double and torch.dtype as the library's
        DType code. Kernels may access the tensors among the arguments and those in `touched`.
        """
        tensors = [*touched, *(each for each in arguments if isinstance(each, Tensor))]
        storages = (each.untyped_storage() for each in tensors)
        self._allocations = sorted({(each.data_ptr(), each.nbytes()) for each in storages})
        self._failed = None
        self._library.megalite_ptx_runtime(*self._callbacks)
        assert self._library.megalite_ptx_chip(self.capability), f"no chip that is known: {self.capability}"
        if self.most_shared is not None:
            self._library.megalite_ptx_most_shared(ctypes.c_size_t(self.most_shared))
        error = getattr(self._library, function)(*map(_passed, arguments), None)
        if self._failed is not None:
            raise self._failed
        return error

    def kernel(self, name: str) -> parse.Kernel:
        if name not in self._kernels:
            kernel = self.module.kernel(name)
            if unknown := unknown_forms(kernel):
                raise parse.PtxError(f"{name} has instructions that are not interpreted: {sorted(unknown)}")
            self._kernels[name] = kernel
        return self._kernels[name]

    def _fits(self, name: bytes, threads: int, shared: int, most_shared: int) -> int:
        """Run a launch and return its CUDA error code; 0: success."""
        try:
            kernel = self.kernel(name.decode())
        except Exception as failed:
            self._failed = failed
            return _LAUNCH_FAILURE
        _, size = layout(kernel, shared)
        too_many = kernel.most_threads is not None and threads > kernel.most_threads
        return _INVALID_VALUE if too_many or size > most_shared else 0

    def _launch(self, name: bytes, grid: object, block: object, shared: int, arguments: object) -> int:
        try:
            kernel = self.kernel(name.decode())
            places, size = parameter_places(kernel)
            given = bytearray(-(-size // 16) * 16)
            for which, variable in enumerate(kernel.parameters):
                begin = places[variable.name]
                given[begin : begin + variable.size] = ctypes.string_at(arguments[which], variable.size)
            extents = [(each[0], each[1], each[2]) for each in (grid, block)]
            launch = Launch(
                *extents, shared, bytes(given), self.order, self.late_copies, self.unwritten, self.watched
            )
            self.launched.append((kernel.name, launch))
            memory = Global(self._allocations, watched=self.watched)
            at_once = max(1, _TOGETHER // (-(-launch.threads // 32) * 32))
            blocks = range(launch.blocks) if self.chosen is None else self.chosen(launch)
            for begin in range(0, len(blocks), at_once):
                Machine(kernel, launch, blocks[begin : begin + at_once], memory).run()
        except Exception as failed:
            # Exceptions cannot propagate through the host code.
            self._failed = failed
            return _LAUNCH_FAILURE
        return 0


__all__ = ["Device", "Fault", "unknown_forms"]
