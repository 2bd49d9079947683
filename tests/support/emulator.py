"""The emulator of tests/kernels/emulator, compiled once per run, and its C interface."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from tests.support.attention import Packed

SOURCES = Path(__file__).parents[1] / "kernels" / "emulator"
CSRC = Path(__file__).parents[2] / "megalite" / "csrc"
COMPILER = shutil.which("g++")
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Problem(ctypes.Structure):
    """MegaliteAttention of megalite/csrc/attention.h."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("sequences", "queries", "keys", "longest_query", "longest_key")]
        + [(name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_size", "left", "right")]
        + [("scale", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in ("query", "key", "value")]
        + [(f"{name}_{of}", ctypes.c_int64) for name in ("query", "key", "value") for of in ("token", "head")]
        + [(name, ctypes.c_void_p) for name in ("query_starts", "key_starts")]
        + [
            (name, ctypes.c_int64)
            for name in ("query_row", "key_row", "first_query", "first_key", "positioned")
        ]
        + [("samples", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("dropped", "drop_key_low", "drop_key_high", "first_head")]
        + [(name, ctypes.c_void_p) for name in ("output", "lse")]
        + [(name, ctypes.c_void_p) for name in ("output_grad", "lse_grad")]
        + [(name, ctypes.c_void_p) for name in ("query_grad", "key_grad", "value_grad")]
        + [(name, ctypes.c_void_p) for name in ("statistics", "query_sums")]
    )


class Report(ctypes.Structure):
    """The findings of a run: shared-memory bank conflicts, and the first forbidden action."""

    _fields_ = (("conflicts", ctypes.c_int), ("problem", ctypes.c_char_p))


def compiled(source: str, *flags: str) -> Path:
    """Compile `source` of tests/kernels/emulator into a new folder; return the path of the result."""
    assert COMPILER is not None, "a C++ compiler is needed to test the kernels' source"
    target = Path(tempfile.mkdtemp(prefix="megalite-emulator-")) / source.removesuffix(".cpp")
    command = [
        COMPILER,
        "-std=c++20",
        f"-I{CSRC}",
        f"-I{SOURCES}",
        *flags,
        str(SOURCES / source),
        "-o",
        str(target),
    ]
    subprocess.run([*command, "-lpthread"], check=True, capture_output=True, text=True)
    return target


@functools.cache
def library() -> ctypes.CDLL:
    """Return the emulator that runs threads as fibers."""
    return ctypes.CDLL(str(compiled("emulate.cpp", "-O2", "-fPIC", "-shared")))


def problem(
    packed: Packed, query: Tensor, key: Tensor, value: Tensor, starts: tuple[Tensor, Tensor]
) -> Problem:
    """Return the kernels' arguments, without the addresses of the results."""
    told = Problem(
        sequences=len(packed.queries), queries=len(query), keys=len(key),
        longest_query=max(packed.queries), longest_key=max(packed.keys), heads=packed.heads,
        kv_heads=packed.kv_heads, head_size=packed.head_size, left=packed.left, right=packed.right,
        scale=packed.scale, query_starts=starts[0].data_ptr(), key_starts=starts[1].data_ptr(),
    )  # fmt: skip
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        setattr(told, name, tensor.data_ptr())
        setattr(told, f"{name}_token", tensor.stride(0))
        setattr(told, f"{name}_head", tensor.stride(1))
    rows = 1 if packed.mask is None else len(packed.mask.sample_indices)
    rows, first_query, first_key = packed.positions or (rows, (len(key) - len(query)) // rows, 0)
    told.query_row, told.key_row = max(1, len(query) // rows), max(1, len(key) // rows)
    told.first_query, told.first_key = first_query, first_key
    told.positioned = packed.positions is not None
    if packed.mask is not None:
        told.samples = packed.mask.sample_indices.data_ptr()
        told.dropped, told.first_head = packed.mask.dropped, packed.mask.heads.start
        told.drop_key_low, told.drop_key_high = packed.mask.key
    return told


def run(
    told: Problem,
    tensors: list[Tensor],
    *,
    backward: bool,
    late: bool,
    left_out_sync: int = -1,
    shared: int = 227 * 1024,
) -> Report:
    """Run the kernels, which may access only the memory of `tensors`; the first tensor has the kernels' dtype.

    late: asynchronous copies complete when they are waited for, else at once. left_out_sync: the number of the barrier
    that all threads skip. shared: the chip's limit of shared memory per block in bytes.
    """
    begins = (ctypes.c_void_p * len(tensors))(*(each.untyped_storage().data_ptr() for each in tensors))
    sizes = (ctypes.c_int64 * len(tensors))(*(each.untyped_storage().nbytes() for each in tensors))
    report = Report()
    library().emulate(
        ctypes.byref(told), _DTYPES[tensors[0].dtype], int(backward), int(late), left_out_sync, shared, len(tensors),
        begins, sizes, ctypes.byref(report),
    )  # fmt: skip
    return report
