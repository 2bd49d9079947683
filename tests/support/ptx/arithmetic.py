"""Instructions that compute registers from registers: for each form, its types and a NumPy function.

`.rn` forms round exactly as the PTX ISA says. `.approx` forms have an error of the size that the ISA allows, a function
of the operands only: a kernel must tolerate the errors of any GPU.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Pure:
    """A result type, the operands' types, and the function that computes the result from arrays."""

    result: str
    operands: tuple[str, ...]
    compute: Callable[..., Array]


NUMPY = {
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64, "f16": np.float16,
    "s8": np.int8, "u8": np.uint8, "b8": np.uint8, "pred": np.bool_,
}  # fmt: skip

FORMS: dict[str, Pure] = {}


def _add(form: str, result: str, operands: tuple[str, ...], compute: Callable[..., Array]) -> None:
    assert form not in FORMS, form
    FORMS[form] = Pure(result, operands, compute)


def _same(forms: str, kinds: str, count: int, compute: Callable[..., Array]) -> None:
    """Add forms with `count` operands of the result's type, for each form and each type."""
    for kind in kinds.split():
        for form in forms.split():
            _add(f"{form}.{kind}", kind, (kind,) * count, compute)


# Integers, which wrap.
_same("add", "s32 s64 u32 u64 s16 u16", 2, np.add)
_same("sub", "s32 s64 u32 u64 s16 u16", 2, np.subtract)
_same("mul.lo", "s32 s64 u32 u64", 2, np.multiply)
_same("mad.lo", "s32 s64 u32 u64", 3, lambda a, b, c: a * b + c)
_same("neg", "s32 s64", 1, np.negative)
_same("min", "s32 s64 u32 u64", 2, np.minimum)
_same("max", "s32 s64 u32 u64", 2, np.maximum)
_same("and", "b16 b32 b64 pred", 2, np.bitwise_and)
_same("or", "b16 b32 b64 pred", 2, np.bitwise_or)
_same("xor", "b16 b32 b64 pred", 2, np.bitwise_xor)
_same("not", "b32 b64 pred", 1, np.invert)
for _kind, _double in (("s32", np.int64), ("u32", np.uint64)):
    _to = _kind[0] + "64"
    _add(f"mul.wide.{_kind}", _to, (_kind, _kind), lambda a, b, to=_double: a.astype(to) * b.astype(to))
    _add(
        f"mul.hi.{_kind}", _kind, (_kind, _kind),
        lambda a, b, to=_double, half=NUMPY[_kind]: ((a.astype(to) * b.astype(to)) >> to(32)).astype(half),
    )  # fmt: skip


def _shifted(shift: Callable[..., Array], bits: int, signed: bool) -> Callable[..., Array]:
    """Return a shift that gives zero, or the sign, for shifts by the type's width or more."""

    def compute(value: Array, by: Array) -> Array:
        within = shift(value, np.minimum(by, bits - 1).astype(value.dtype))
        if signed:
            return within
        return np.where(by >= bits, value.dtype.type(0), within)

    return compute


for _bits in (16, 32, 64):
    _add(f"shl.b{_bits}", f"b{_bits}", (f"b{_bits}", "u32"), _shifted(np.left_shift, _bits, False))
    _add(f"shr.u{_bits}", f"u{_bits}", (f"u{_bits}", "u32"), _shifted(np.right_shift, _bits, False))
    _add(f"shr.s{_bits}", f"s{_bits}", (f"s{_bits}", "u32"), _shifted(np.right_shift, _bits, True))


class DividedByZero(Exception):
    """An integer division by zero, whose result PTX leaves undefined."""


def _quotient(a: Array, b: Array) -> Array:
    """Divide integers, rounding towards zero."""
    if (b == 0).any():
        raise DividedByZero
    if a.dtype.kind == "u":
        return a // b
    down = a // b
    return down + ((down < 0) & (down * b != a)).astype(a.dtype)


_same("div", "s32 s64 u32 u64", 2, _quotient)
_same("rem", "s32 s64 u32 u64", 2, lambda a, b: a - _quotient(a, b) * b)


def _inserted(source: Array, into: Array, position: Array, length: Array) -> Array:
    position, length = np.minimum(position & 0xFF, 32), np.minimum(length & 0xFF, 32)
    ones = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)
    mask = (ones << position.astype(np.uint64)) & np.uint64(0xFFFFFFFF)
    moved = source.astype(np.uint64) << position.astype(np.uint64)
    return ((into & ~mask) | (moved & mask)).astype(np.uint32)


_add("bfi.b32", "b32", ("b32", "b32", "u32", "u32"), _inserted)

# Floating point.


def _machine_functions() -> ctypes.CDLL:
    from tests.support.ptx.build import arithmetic_library

    return arithmetic_library()


def _fused(name: str, kind: type[np.generic]) -> Callable[..., Array]:
    """Return a fused multiply-add by the C library: NumPy has none."""

    def compute(*operands: Array) -> Array:
        a, b, c = (np.ascontiguousarray(each) for each in np.broadcast_arrays(*operands))
        result = np.empty(a.shape, kind)
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in (a, b, c, result)]
        getattr(_machine_functions(), name)(ctypes.c_int64(a.size), *pointers)
        return result

    return compute


_same("add add.rn", "f32 f64", 2, np.add)
_same("sub sub.rn", "f32 f64", 2, np.subtract)
_same("mul mul.rn", "f32 f64", 2, np.multiply)
_same("div.rn", "f32 f64", 2, np.divide)
_same("rcp.rn", "f32 f64", 1, lambda a: a.dtype.type(1) / a)
_same("sqrt.rn", "f32 f64", 1, np.sqrt)
_same("neg", "f32 f64", 1, np.negative)
_same("abs", "f32 f64", 1, np.abs)
_add("fma.rn.f32", "f32", ("f32",) * 3, _fused("megalite_fma_f32", np.float32))
_add("fma.rm.f32", "f32", ("f32",) * 3, _fused("megalite_fma_down_f32", np.float32))
_add("fma.rn.f64", "f64", ("f64",) * 3, _fused("megalite_fma_f64", np.float64))


def _larger(a: Array, b: Array) -> Array:
    """Return the maximum: the other operand if one is NaN; +0 is larger than -0."""
    return np.where((a == b) & np.signbit(a), b, np.fmax(a, b))


_same("max", "f32 f64", 2, _larger)
_same("min", "f32 f64", 2, lambda a, b: -_larger(-a, -b))


def _off(exact: Array, operand: Array, allowed: float) -> Array:
    """Return float64 results with a relative error of up to `allowed`, a hash of the operand's bits."""
    drawn = (operand.view(np.uint32) * np.uint32(2654435761) >> np.uint32(16)).astype(np.float64)
    return exact * (1 + allowed * (drawn / 32768 - 1))


def _flushed(value: Array) -> Array:
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value)


def _power_of_two(x: Array) -> Array:
    exact = np.exp2(_flushed(x).astype(np.float64))
    moved = np.where(exact == 1, 1, _off(exact, x, 2.0**-22))
    return _flushed(moved.astype(np.float32))


def _approximate_quotient(a: Array, b: Array) -> Array:
    """Divide within two units in the last place for 2^-126 <= |b| <= 2^126; larger b give 0, or NaN for infinity."""
    near = _off(a.astype(np.float64) / b.astype(np.float64), a.view(np.uint32) ^ b.view(np.uint32), 2.0**-22)
    far = np.where(np.isinf(a), np.nan, np.copysign(0.0, a) * np.copysign(1.0, b))
    huge = (np.abs(b) > 2.0**126) & np.isfinite(b)
    return np.where(huge, far, near).astype(np.float32)


def _gross_reciprocal(x: Array) -> Array:
    """Return the approximate reciprocal, of which only the upper half of the bits is defined."""
    bits = (1 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
    inverse = bits.view(np.float64)
    return np.where(np.abs(inverse) < np.finfo(np.float64).tiny, np.copysign(0.0, x), inverse)


_add("ex2.approx.ftz.f32", "f32", ("f32",), _power_of_two)
_add("div.approx.f32", "f32", ("f32", "f32"), _approximate_quotient)
_add("rcp.approx.ftz.f64", "f64", ("f64",), _gross_reciprocal)

# Comparisons: those that end in u are true if an operand is NaN.


def _unordered(compare: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_ORDERS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
}  # fmt: skip
for _name, _compare in _ORDERS.items():
    for _kind in ("s16", "u16", "s32", "u32", "s64", "u64", "f32", "f64"):
        _add(f"setp.{_name}.{_kind}", "pred", (_kind, _kind), _compare)
    for _kind in ("f32", "f64"):
        _add(f"setp.{_name}u.{_kind}", "pred", (_kind, _kind), _unordered(_compare))
for _kind in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"):
    _add(f"setp.ne.{_kind}", "pred", (_kind, _kind), np.not_equal)
for _kind in ("b16", "b32", "b64"):
    _add(f"setp.eq.{_kind}", "pred", (_kind, _kind), np.equal)
for _kind in ("f32", "f64"):
    _add(f"setp.neu.{_kind}", "pred", (_kind, _kind), np.not_equal)
    _add(f"setp.ne.{_kind}", "pred", (_kind, _kind), lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b))
    _add(f"setp.nan.{_kind}", "pred", (_kind, _kind), lambda a, b: np.isnan(a) | np.isnan(b))
    _add(f"setp.num.{_kind}", "pred", (_kind, _kind), lambda a, b: ~np.isnan(a) & ~np.isnan(b))
for _kind in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
    _add(f"selp.{_kind}", _kind, (_kind, _kind, "pred"), lambda a, b, which: np.where(which, a, b))

# Conversions.


def _converted(to: str) -> Callable[..., Array]:
    return lambda a: a.astype(NUMPY[to])


for _form in (
    "s64.s32", "u64.u32", "u32.u64", "u32.u16", "s32.s16", "u16.u32", "s64.s16", "u64.u16", "f64.f32",
    "rn.f32.f64", "rn.f32.s32", "rn.f32.u32", "rn.f32.s64", "rn.f32.u64", "rn.f64.s32", "rn.f64.s64", "f32.f16",
):  # fmt: skip
    _result, _operand = _form.removeprefix("rn.").split(".")
    _add(f"cvt.{_form}", _result, (_operand,), _converted(_result))
_add(
    "cvt.sat.f32.f32", "f32", ("f32",),
    lambda a: np.where(np.isnan(a), np.float32(0), np.clip(a, np.float32(0), np.float32(1))),
)  # fmt: skip


def to_bf16(value: Array) -> Array:
    """Bits, rounded to nearest, ties to even; NaN is 0x7fff."""
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_f16(value: Array) -> Array:
    """Bits, rounded to nearest, ties to even; NaN is 0x7fff."""
    return np.where(np.isnan(value), np.uint16(0x7FFF), value.astype(np.float16).view(np.uint16))


for _name, _to in (("bf16", to_bf16), ("f16", to_f16)):
    _add(f"cvt.rn.{_name}.f32", "b16", ("f32",), _to)
    _add(
        f"cvt.rn.{_name}x2.f32", "b32", ("f32", "f32"),  # the first is the upper half
        lambda a, b, to=_to: to(a).astype(np.uint32) << np.uint32(16) | to(b),
    )  # fmt: skip
