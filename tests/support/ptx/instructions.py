"""Instructions that move data: registers, memory, shuffles; and the known forms of all instructions."""

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx import arithmetic, parse, tensor_core
from tests.support.ptx.arithmetic import NUMPY
from tests.support.ptx.machine import Lanes, Machine, Step
from tests.support.ptx.memory import GENERIC_SHARED, Fault

Array = NDArray[np.generic]
Read = Callable[[Lanes], Array]
Write = Callable[[Lanes, Array], None]

_ACCESS = re.compile(
    r"(?P<what>ld|st)(?P<space>\.global\.nc|\.global|\.shared|\.param|)(?:\.v(?P<count>[24]))?\.(?P<kind>[busf]\d+)"
)
_MOVES = {f"mov.{kind}" for kind in ("pred", "b16", "u16", "b32", "u32", "f32", "b64", "u64", "f64")}
_ADDRESSES = {"cvta.to.global.u64", "cvta.shared.u64", "cvta.to.shared.u64"}
_FLOW = {"bra", "bra.uni", "ret", "exit", "trap"}
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global")


def known(instruction: parse.Instruction) -> bool:
    """Return whether the interpreter executes this form with all of its modifiers."""
    form, operands = instruction.form, instruction.operands
    if form in ("bar.sync",):
        return operands == (parse.Immediate(0, "i"),) and instruction.guard is None
    if (
        form.startswith("shfl.sync") or form == "bar.warp.sync" or form in tensor_core.FORMS
    ) and instruction.guard:
        return False
    access = _ACCESS.fullmatch(form)
    if access is not None:
        return not (access["what"] == "st" and access["space"] in (".global.nc", ".param"))
    return (
        form in arithmetic.FORMS
        or form in _MOVES | _ADDRESSES | _FLOW | set(_OTHERS)
        or form in tensor_core.FORMS
    )


def prepared(machine: Machine, instruction: parse.Instruction) -> Step:
    """Return the instruction as a step that runs for lanes of this machine."""
    form = instruction.form
    if form in _FLOW or form == "bar.sync":
        return Step(instruction)
    if form in arithmetic.FORMS:
        return Step(instruction, _pure(machine, instruction))
    if form in _MOVES:
        return Step(instruction, _move(machine, instruction))
    if form in _ADDRESSES:
        return Step(instruction, _address(machine, instruction))
    if form in tensor_core.FORMS:
        everyone = np.uint32(0xFFFFFFFF)
        run = tensor_core.FORMS[form](machine, instruction)
        return Step(instruction, run, members=lambda lanes: np.full(len(lanes), everyone))
    if access := _ACCESS.fullmatch(form):
        return Step(instruction, (_load if access["what"] == "ld" else _store)(machine, instruction, access))
    return _OTHERS[form](machine, instruction)


def _width(machine: Machine, name: str) -> str:
    kind = parse.register_type(machine.kernel, name)
    assert kind is not None
    return kind


def reader(machine: Machine, operand: parse.Operand, kind: str, *, wider: bool = False) -> Read:
    """Return a function that reads the operand as `kind` in some lanes.

    wider: the register may be wider than `kind`; its low part is read.
    """
    to = NUMPY[kind]
    if isinstance(operand, parse.Register):
        values = machine.register(operand.name)
        if kind == "pred":
            _expect(values.dtype == np.bool_, f"{operand.name} is no predicate")
            return (lambda at: ~values[at]) if operand.negated else (lambda at: values[at])
        _expect(not operand.negated and values.dtype != np.bool_, f"{operand.name} is read as {kind}")
        if wider and values.itemsize > np.dtype(to).itemsize:
            low = np.dtype(f"u{np.dtype(to).itemsize}")
            return lambda at: values[at].astype(low).view(to)
        _expect(values.itemsize == np.dtype(to).itemsize, f"{operand.name} is not as wide as {kind}")
        seen = values.view(to)
        return lambda at: seen[at]
    if isinstance(operand, parse.Immediate):
        bits = np.dtype(to).itemsize * 8
        _expect(operand.kind == "i" or kind[0] in "fb" or kind == "pred", f"a number with a point as {kind}")
        if kind == "pred":
            constant = np.array([bool(operand.bits)])
        else:
            constant = np.array([operand.bits & ((1 << bits) - 1)], f"u{bits // 8}").view(to)
            _expect(kind[0] != "f" or operand.kind == "f", f"a whole number as {kind}")
        return lambda at: constant
    if isinstance(operand, parse.Special):
        values = machine.special[operand.name]
        _expect(np.dtype(to).itemsize == 4, f"{operand.name} as {kind}")
        return lambda at: values[at].view(to)
    if isinstance(operand, parse.Symbol):
        place = np.array([_symbol(machine, operand.name)], to)
        return lambda at: place
    raise parse.PtxError(f"no operand to read: {operand}")


def writer(machine: Machine, operand: parse.Operand, kind: str, *, wider: bool = False) -> Write:
    """Return a function that writes a register in some lanes.

    wider: the register may be wider than `kind`; values are sign-extended.
    """
    if operand == parse.Symbol("_"):
        return lambda at, values: None
    if not isinstance(operand, parse.Register) or operand.negated:
        raise parse.PtxError(f"no operand to write: {operand}")
    values, to = machine.register(operand.name), np.dtype(NUMPY[kind])
    if wider and values.itemsize > to.itemsize:
        whole = values.view(f"{'i' if kind[0] == 's' else 'u'}{values.itemsize}")

        def extend(at: Lanes, given: Array) -> None:
            whole[at] = given.astype(whole.dtype)

        return extend
    _expect((values.dtype == np.bool_) == (kind == "pred"), f"{operand.name} is written as {kind}")
    _expect(values.itemsize == to.itemsize, f"{operand.name} is not as wide as {kind}")
    seen = values.view(to)

    def write(at: Lanes, given: Array) -> None:
        seen[at] = given.view(to) if given.dtype != to else given

    return write


def _expect(true: bool, what: str) -> None:
    if not true:
        raise parse.PtxError(what)


def _symbol(machine: Machine, name: str) -> int:
    for places in (machine.parameter_places, machine.shared_places):
        if name in places:
            return places[name]
    raise parse.PtxError(f"no symbol that is known: {name}")


def _pure(machine: Machine, instruction: parse.Instruction) -> Callable[[Lanes], None]:
    pure = arithmetic.FORMS[instruction.form]
    result, *operands = instruction.operands
    _expect(len(operands) == len(pure.operands), f"{instruction.text}: {len(operands)} operands")
    reads = [reader(machine, each, kind) for each, kind in zip(operands, pure.operands, strict=True)]
    write, compute = writer(machine, result, pure.result), pure.compute

    def run(at: Lanes) -> None:
        try:
            write(at, compute(*(read(at) for read in reads)))
        except arithmetic.DividedByZero:
            raise Fault("divides by zero") from None

    return run


def _move(machine: Machine, instruction: parse.Instruction) -> Callable[[Lanes], None]:
    """Compile mov, also between a value and a vector of its parts, lowest part first."""
    to, source = instruction.operands
    kind = instruction.form.removeprefix("mov.")
    if not isinstance(to, parse.Vector) and not isinstance(source, parse.Vector):
        read, write = reader(machine, source, kind), writer(machine, to, kind)
        return lambda at: write(at, read(at))
    parts = (to if isinstance(to, parse.Vector) else source).parts
    _expect(int(kind[1:]) % len(parts) == 0, instruction.text)
    part = f"b{int(kind[1:]) // len(parts)}"
    if isinstance(to, parse.Vector):
        read, writes = reader(machine, source, kind), [writer(machine, each, part) for each in parts]

        def take_apart(at: Lanes) -> None:
            values = np.ascontiguousarray(read(at)).view(NUMPY[part]).reshape(-1, len(parts))
            for which, write in enumerate(writes):
                write(at, values[:, which])

        return take_apart
    reads, write = [reader(machine, each, part) for each in parts], writer(machine, to, kind)

    def put_together(at: Lanes) -> None:
        values = np.stack(np.broadcast_arrays(*(read(at) for read in reads)), axis=-1)
        write(at, np.ascontiguousarray(values).view(NUMPY[kind])[..., 0])

    return put_together


def _address(machine: Machine, instruction: parse.Instruction) -> Callable[[Lanes], None]:
    to, source = instruction.operands
    read, write = reader(machine, source, "u64"), writer(machine, to, "u64")
    base = np.uint64(GENERIC_SHARED)

    def run(at: Lanes) -> None:
        values = read(at)
        if instruction.form == "cvta.shared.u64":
            values = values + base
        elif instruction.form == "cvta.to.shared.u64":
            _refuse(values < base, "is no address of shared memory")
            values = values - base
        else:
            _refuse(values >= base, "is no address of global memory")
        write(at, values)

    return run


def _refuse(wrong: Array, what: str) -> None:
    if wrong.any():
        raise Fault(what, int(np.flatnonzero(wrong)[0]))


def effective(machine: Machine, operand: parse.Operand) -> Read:
    """Return a function for the addresses of an operand in brackets."""
    if not isinstance(operand, parse.Address):
        raise parse.PtxError(f"no address: {operand}")
    offset = np.uint64(operand.offset & 0xFFFFFFFFFFFFFFFF)
    if isinstance(operand.base, parse.Symbol):
        base = np.uint64(_symbol(machine, operand.base.name))
        return lambda at: np.full(_count(machine, at), base + offset)
    wide = isinstance(operand.base, parse.Register) and machine.register(operand.base.name).itemsize == 8
    read = reader(machine, operand.base, "u64" if wide else "u32")

    def address(at: Lanes) -> Array:
        return np.broadcast_to(read(at).astype(np.uint64) + offset, (_count(machine, at),))

    return address


def _count(machine: Machine, at: Lanes) -> int:
    return machine.count if isinstance(at, slice) else len(at)


def access(
    machine: Machine, space: str, address: Array, size: int, at: Lanes, *, write: bool
) -> Callable[[str], tuple[Array, Array]]:
    """Check an access of `size` bytes by each of the lanes `at`; return a function: type -> array and indices."""
    _refuse(
        address % np.uint64(size) != 0, f"touches {size} bytes at an address that is no multiple of {size}"
    )
    if space == "" and (address >= np.uint64(GENERIC_SHARED)).any():
        _expect(bool((address >= np.uint64(GENERIC_SHARED)).all()), "generic addresses of two spaces at once")
        space, address = ".shared", address - np.uint64(GENERIC_SHARED)
    if space == ".param":
        _expect(not write, "a parameter is written")
        _refuse(address + np.uint64(size) > machine.parameters.size, "reads past the parameters")
        return lambda kind: (
            machine.parameters[: machine.parameters.size // 16 * 16].view(kind),
            address.astype(np.int64) // np.dtype(kind).itemsize,
        )
    number, blocks, warps = machine.number[at], machine.barriers[at], machine.warp_syncs[at]
    if space == ".shared":
        block = machine.block[at]
        places, shadow = machine.shared.places(address, size, block), machine.shared.shadow
        if not write and machine.launch.watched and machine.shared.unwritten is None:
            _refuse(~shadow.written(places).all(0), "reads shared memory that nobody wrote")
        find = lambda kind: machine.shared.index(address, kind, block)  # noqa: E731
    else:
        places, shadow = machine.memory.places(address, size), machine.memory.shadow
        if space == ".global.nc" and shadow is not None:
            _refuse(shadow.written(places).any(0), "reads past the caches what this launch wrote")
        find = lambda kind: machine.memory.index(address, kind)  # noqa: E731
    if shadow is not None and machine.launch.watched:
        (shadow.write if write else shadow.read)(places, number, blocks, warps)
    return find


def _load(machine: Machine, instruction: parse.Instruction, form: re.Match[str]) -> Callable[[Lanes], None]:
    kind, count = form["kind"], int(form["count"] or 1)
    to, source = instruction.operands
    parts = to.parts if isinstance(to, parse.Vector) else (to,)
    _expect(len(parts) == count, instruction.text)
    writes = [writer(machine, each, kind, wider=True) for each in parts]
    address, size = effective(machine, source), np.dtype(NUMPY[kind]).itemsize * count

    def run(at: Lanes) -> None:
        memory, index = access(machine, form["space"], address(at), size, at, write=False)(
            np.dtype(NUMPY[kind]).str
        )
        values = [memory[index + which] for which in range(count)]
        for write, each in zip(writes, values, strict=True):
            write(at, each)

    return run


def _store(machine: Machine, instruction: parse.Instruction, form: re.Match[str]) -> Callable[[Lanes], None]:
    kind, count = form["kind"], int(form["count"] or 1)
    to, source = instruction.operands
    parts = source.parts if isinstance(source, parse.Vector) else (source,)
    _expect(len(parts) == count, instruction.text)
    reads = [reader(machine, each, kind, wider=True) for each in parts]
    address, size = effective(machine, to), np.dtype(NUMPY[kind]).itemsize * count

    def run(at: Lanes) -> None:
        memory, index = access(machine, form["space"], address(at), size, at, write=True)(
            np.dtype(NUMPY[kind]).str
        )
        for which, read in enumerate(reads):
            memory[index + which] = read(at)

    return run


def _shuffle(machine: Machine, instruction: parse.Instruction) -> Step:
    to, source, operand, clamp, mask = instruction.operands
    _expect(clamp in (parse.Immediate(31, "i"),) or isinstance(clamp, parse.Register), instruction.text)
    value, valid = (to.first, to.second) if isinstance(to, parse.Pair) else (to, parse.Symbol("_"))
    write, read = writer(machine, value, "b32"), reader(machine, source, "b32")
    write_valid = writer(machine, valid, "pred")
    distance, limit = reader(machine, operand, "u32"), reader(machine, clamp, "u32")
    members = reader(machine, mask, "b32")
    which = instruction.form.split(".")[2]

    def run(at: Lanes) -> None:
        own = np.arange(machine.count)[at]
        lane = own % 32
        by, end = (np.broadcast_to(each(at), own.shape).astype(np.int64) for each in (distance, limit))
        _refuse(
            (end != 31) | (by < 0) | (by > 31), "shuffles within a part of a warp, which is not interpreted"
        )
        from_lane = {"bfly": lane ^ by, "down": lane + by, "idx": by}[which]
        inside = from_lane <= 31
        from_lane = np.where(inside, from_lane, lane)
        source_lane = own - lane + from_lane
        named = np.broadcast_to(members(at), own.shape) >> from_lane.astype(np.uint32) & np.uint32(1)
        _refuse(named == 0, "reads from a lane that its mask does not name")
        every = np.empty(machine.count, np.uint32)
        every[own] = read(at)
        write(at, every[source_lane])
        write_valid(at, inside)

    return Step(instruction, run, members=lambda lanes: np.broadcast_to(members(lanes), lanes.shape))


def _sync_warp(machine: Machine, instruction: parse.Instruction) -> Step:
    members = reader(machine, instruction.operands[0], "b32")

    def run(at: Lanes) -> None:
        machine.warp_syncs[at] += 1

    return Step(instruction, run, members=lambda lanes: np.broadcast_to(members(lanes), lanes.shape))


def _copy(machine: Machine, instruction: parse.Instruction) -> Step:
    """Compile cp.async: bytes that are not read become zero."""
    to, source, whole, *read_bytes = instruction.operands
    _expect(isinstance(whole, parse.Immediate), instruction.text)
    size = whole.bits
    _expect(size == 16 or (size in (4, 8) and ".ca." in instruction.form), instruction.text)
    target, begin = effective(machine, to), effective(machine, source)
    count = reader(machine, read_bytes[0], "u32") if read_bytes else None

    def run(at: Lanes) -> None:
        targets, sources = target(at).copy(), begin(at).copy()
        taken = (
            np.full(targets.shape, size)
            if count is None
            else np.broadcast_to(count(at), targets.shape).astype(int)
        )
        _refuse((taken != 0) & (taken != size), "copies a part, which is not interpreted")
        own = np.arange(machine.count)[at]

        def land() -> None:
            there = taken != 0
            values = np.zeros((len(own), size // 4), np.uint32)
            if there.any():
                find = access(machine, ".global", sources[there], size, own[there], write=False)
                memory, index = find("<u4")
                values[there] = memory[index[:, None] + np.arange(size // 4)]
            memory, index = access(machine, ".shared", targets, size, own, write=True)("<u4")
            memory[index[:, None] + np.arange(size // 4)] = values

        if machine.launch.late_copies:
            machine.copies.append((own, land))
        else:
            land()

    return Step(instruction, run)


def _wait_for_copies(machine: Machine, instruction: parse.Instruction) -> Step:
    _expect(not instruction.operands, instruction.text)

    def run(at: Lanes) -> None:
        own = np.arange(machine.count)[at]
        kept = []
        for lanes, land in machine.copies:
            mine = np.isin(lanes, own)
            if mine.all():
                land()
            elif mine.any():
                raise Fault(
                    "waits for copies of a part of the lanes that began them, which is not interpreted"
                )
            else:
                kept.append((lanes, land))
        machine.copies = kept

    return Step(instruction, run)


def _add_in_turn(memory: Array, index: Array, values: Array) -> None:
    """Add like np.add.at, which would copy all of `memory`."""
    left = np.arange(len(index))
    while len(left):
        _, first = np.unique(index[left], return_index=True)
        memory[index[left[first]]] += values[left[first]]
        left = np.delete(left, first)


def _add_to_memory(machine: Machine, instruction: parse.Instruction) -> Step:
    """Compile atom.add and red.add of float32, one thread after another; they order no other access."""
    *result, to, source = instruction.operands
    parts = source.parts if isinstance(source, parse.Vector) else (source,)
    reads = [reader(machine, each, "f32") for each in parts]
    address = effective(machine, to)
    write = writer(machine, result[0], "f32") if result else None
    size = 4 * len(parts)

    def run(at: Lanes) -> None:
        addresses = address(at)
        _refuse(addresses % np.uint64(size) != 0, f"adds at an address that is no multiple of {size}")
        machine.memory.places(addresses, size)
        memory, index = machine.memory.index(addresses, "<f4")
        if write is not None:
            _expect(
                len(np.unique(index)) == len(index),
                "an atomic sum of two threads of a step whose result is kept",
            )
            write(at, memory[index])
        for which, read in enumerate(reads):
            _add_in_turn(memory, index + which, np.broadcast_to(read(at), index.shape))

    return Step(instruction, run)


_OTHERS: dict[str, Callable[[Machine, parse.Instruction], Step]] = {
    "shfl.sync.bfly.b32": _shuffle,
    "shfl.sync.down.b32": _shuffle,
    "shfl.sync.idx.b32": _shuffle,
    "bar.warp.sync": _sync_warp,
    "cp.async.ca.shared.global": _copy,
    "cp.async.cg.shared.global": _copy,
    "cp.async.wait_all": _wait_for_copies,
    "atom.global.add.f32": _add_to_memory,
    "red.global.add.f32": _add_to_memory,
    "red.global.add.v2.f32": _add_to_memory,
}
