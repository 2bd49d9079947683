"""Blocks of a grid, executed together: warps in lockstep, reconverged at the smallest program counter.

All blocks of a batch run together as rows of NumPy arrays, one element per thread. Blocks are padded to whole warps by
threads that have already exited. `order` gives each warp of a block a rank: the warps of the highest rank run until
they wait, as far ahead of the others as barriers allow; without an order all warps advance together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx import parse
from tests.support.ptx.memory import SHARED_BASE, Fault, Global, Shared

Lanes = NDArray[np.int64] | slice
RUNS, AT_BARRIER, AT_WARP, EXITED = range(4)
_MOST_STEPS = 3_000_000


@dataclass(frozen=True)
class Launch:
    """The parameters of a launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    arguments: bytes
    order: Sequence[int] | None = None
    late_copies: bool = True
    """Whether asynchronous copies complete when they are waited for; else at once."""
    unwritten: int | None = None
    """The value of unwritten bytes of shared memory; None: reading one is a fault."""
    watched: bool = True
    """Whether races between two threads are faults."""

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass
class Step:
    """An instruction, ready to run for some lanes."""

    instruction: parse.Instruction
    run: Callable[[Lanes], None] | None = None
    guard: NDArray[np.bool_] | None = None
    target: int = -1
    """The target of a branch."""
    members: Callable[[Lanes], NDArray[np.generic]] | None = None
    """For a warp-wide instruction: the mask of the lanes that take part."""


def layout(kernel: parse.Kernel, dynamic: int) -> tuple[dict[str, int], int]:
    """Return the addresses of the shared variables and their total size; dynamic shared memory comes last."""
    places, end = {}, SHARED_BASE
    for variable in sorted(kernel.shared, key=lambda each: each.size == 0):
        end = -(-end // variable.align) * variable.align
        places[variable.name] = end
        end += variable.size
    return places, end - SHARED_BASE + dynamic


def parameter_places(kernel: parse.Kernel) -> tuple[dict[str, int], int]:
    """Return the offset of each parameter in the argument buffer, and the buffer's size."""
    places, end = {}, 0
    for variable in kernel.parameters:
        end = -(-end // variable.align) * variable.align
        places[variable.name] = end
        end += variable.size
    return places, end


class Machine:
    """Some blocks of a launch, and their memory."""

    def __init__(self, kernel: parse.Kernel, launch: Launch, blocks: Sequence[int], memory: Global) -> None:
        self.kernel, self.launch, self.memory = kernel, launch, memory
        warps = -(-launch.threads // 32)
        self.width = warps * 32
        self.count = len(blocks) * self.width
        slot = np.arange(self.count)
        self.block = slot // self.width
        own, number = slot % self.width, np.array(blocks)[self.block]
        self.number = number * 1024 + own
        self.special = _places(launch, own, number) | {"%laneid": (slot % 32).astype(np.uint32)}
        self.pc = np.zeros(self.count, np.int64)
        self.state = np.where(own < launch.threads, RUNS, EXITED).astype(np.int8)
        self.cleared = np.zeros(self.count, np.bool_)
        self.want = np.zeros(self.count, np.uint32)
        self.barriers, self.warp_syncs = np.zeros(self.count, np.int32), np.zeros(self.count, np.int32)
        ranks = np.zeros(warps, np.int64) if launch.order is None else np.array(launch.order)[:warps]
        self.rank = ranks[own // 32]
        self.shared_places, size = layout(kernel, launch.dynamic_shared)
        self.shared = Shared(len(blocks), size, launch.unwritten)
        self.parameter_places, _ = parameter_places(kernel)
        self.parameters = np.frombuffer(launch.arguments, np.uint8)
        self.copies: list[tuple[Lanes, Callable[[], None]]] = []
        self.registers: dict[str, NDArray[np.generic]] = {}
        self.steps: list[Step | None] = [None] * len(kernel.code)
        self.leaders = set(kernel.labels.values())
        self.done = 0

    def run(self) -> None:
        """Run until all threads have exited. Raises Fault for forbidden actions."""
        with np.errstate(all="ignore"):
            while not (self.state == EXITED).all():
                runs = np.flatnonzero(self.state == RUNS)
                if not len(runs):
                    raise Fault(f"{self.kernel.name}: threads that wait for others that never come")
                rank = self.rank[runs]
                runs = runs[rank == rank.max()]
                counters = self.pc[runs]
                first = int(counters.min())
                self._go_on(first, runs[counters == first])

    def register(self, name: str) -> NDArray[np.generic]:
        """Return the values of a register in all threads; initially conspicuous bits."""
        if name not in self.registers:
            kind = parse.register_type(self.kernel, name)
            if kind is None:
                raise parse.PtxError(f"no register that is declared: {name}")
            if kind == "pred":
                self.registers[name] = np.zeros(self.count, np.bool_)
            else:
                bits = parse.bits_of(kind)
                poison = 0x7FF7DEAD7FB7DEAD & ((1 << bits) - 1)
                self.registers[name] = np.full(self.count, poison, f"u{bits // 8}")
        return self.registers[name]

    def _go_on(self, pc: int, lanes: NDArray[np.int64]) -> None:
        """Run lanes from pc on until they diverge, wait, exit or reach a point where others may join them."""
        everyone = len(lanes) == self.count
        at: Lanes = slice(None) if everyone else lanes
        begin = pc
        while True:
            if pc >= len(self.steps):
                raise Fault(f"{self.kernel.name}: runs past its end")
            if pc != begin and not everyone and pc in self.leaders:
                self.pc[lanes] = pc
                return
            step = self.steps[pc] or self._prepare(pc)
            self.done += 1
            if self.done > _MOST_STEPS:
                raise Fault(f"{self.kernel.name}: does not end")
            try:
                if step.run is None or step.members is not None:
                    pc = self._transfer(step, pc, at, lanes)
                    if pc < 0:
                        return
                    continue
                chosen = at if step.guard is None else _where(step, at)
                if chosen is not None:
                    step.run(chosen)
            except Fault as fault:
                raise self._told(fault, step, lanes) from None
            pc += 1

    def _transfer(self, step: Step, pc: int, at: Lanes, lanes: NDArray[np.int64]) -> int:
        """Execute a control-flow instruction; return the lanes' next pc, or -1: choose again which lanes run."""
        form = step.instruction.form
        if form in ("bra", "bra.uni"):
            taken = np.ones(len(lanes), np.bool_) if step.guard is None else _taken(step, at)
            if isinstance(at, slice) and (taken.all() or not taken.any()):
                return step.target if taken.all() else pc + 1
            self.pc[lanes] = np.where(taken, step.target, pc + 1)
            return -1
        if form in ("ret", "exit"):
            leave = np.ones(len(lanes), np.bool_) if step.guard is None else _taken(step, at)
            self.pc[lanes] = pc + 1
            self.state[lanes[leave]] = EXITED
            self._open_barriers()
            return -1
        if form == "trap":
            if step.guard is None or _taken(step, at).any():
                raise Fault("traps")
            return pc + 1
        if form == "bar.sync":
            self.state[lanes], self.pc[lanes] = AT_BARRIER, pc
            self._open_barriers()
            return -1
        return self._together(step, pc, at, lanes)

    def _open_barriers(self) -> None:
        """Release the blocks whose live threads all wait at the barrier."""
        states = self.state.reshape(-1, self.width)
        waits = states == AT_BARRIER
        opens = (waits | (states == EXITED)).all(1) & waits.any(1)
        if opens.any():
            freed = np.flatnonzero((waits & opens[:, None]).reshape(-1))
            self.state[freed] = RUNS
            self.pc[freed] += 1
            self.barriers[freed] += 1

    def _together(self, step: Step, pc: int, at: Lanes, lanes: NDArray[np.int64]) -> int:
        """Execute a warp-wide instruction once all lanes of its mask have arrived; return like _transfer."""
        assert step.run is not None
        waiting = lanes[~self.cleared[lanes]]
        if len(waiting) and not (len(waiting) == len(lanes) == self._wait_for_warp(step, pc, waiting)):
            return -1
        self.cleared[lanes] = False
        step.run(at)
        return pc + 1

    def _wait_for_warp(self, step: Step, pc: int, lanes: NDArray[np.int64]) -> int:
        """Return the number of lanes that can continue, including lanes that waited before."""
        assert step.members is not None
        self.state[lanes], self.pc[lanes], self.want[lanes] = AT_WARP, pc, step.members(lanes)
        warps = np.unique(lanes >> 5)
        here = (self.state.reshape(-1, 32)[warps] == AT_WARP) & (self.pc.reshape(-1, 32)[warps] == pc)
        gone = self.state.reshape(-1, 32)[warps] == EXITED
        want = self.want.reshape(-1, 32)[warps]
        named = (want[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) == 1
        for what, wrong in (
            ("has a mask without the lane itself", here & ~np.diagonal(named, axis1=1, axis2=2)),
            ("has a mask that names a lane that has exited", here & (named & gone[:, None]).any(2)),
            (
                "has different masks in lanes that it names",
                here & (named & here[:, None] & (want[:, :, None] != want[:, None])).any(2),
            ),
        ):
            if wrong.any():
                row, lane = (int(each[0]) for each in np.nonzero(wrong))
                raise Fault(what, int(np.searchsorted(lanes, warps[row] * 32 + lane)))
        ready = here & (here[:, None] | ~named).all(2)
        freed = (warps[:, None] * 32 + np.arange(32))[ready]
        self.state[freed], self.cleared[freed] = RUNS, True
        return len(freed)

    def _prepare(self, pc: int) -> Step:
        from tests.support.ptx.instructions import prepared

        instruction = self.kernel.code[pc]
        step = prepared(self, instruction)
        if instruction.guard is not None:
            step.guard = self.register(instruction.guard.name)
        if instruction.form in ("bra", "bra.uni"):
            label = instruction.operands[0]
            assert isinstance(label, parse.Symbol)
            step.target = self.kernel.labels[label.name]
        self.steps[pc] = step
        return step

    def _told(self, fault: Fault, step: Step, lanes: NDArray[np.int64]) -> Fault:
        if step.guard is not None:
            lanes = lanes[step.guard[lanes] != step.instruction.guard.negated]
        slot = int(lanes[min(fault.lane, len(lanes) - 1)])
        places = {name: int(values[slot]) for name, values in self.special.items()}
        block, thread = (tuple(places[f"%{of}.{dim}"] for dim in "xyz") for of in ("ctaid", "tid"))
        return Fault(
            f"{self.kernel.name}, line {step.instruction.line}: `{step.instruction.text}` of thread {thread} in block "
            f"{block} {fault}"
        )


def _places(
    launch: Launch, own: NDArray[np.int64], number: NDArray[np.int64]
) -> dict[str, NDArray[np.uint32]]:
    values = {}
    for of, size, index in (("tid", launch.block, own), ("ctaid", launch.grid, number)):
        values[f"%{of}.x"] = index % size[0]
        values[f"%{of}.y"] = index // size[0] % size[1]
        values[f"%{of}.z"] = index // (size[0] * size[1])
        for dim, extent in zip("xyz", size, strict=True):
            values[f"%n{of}.{dim}"] = np.full(len(own), extent)
    return {name: each.astype(np.uint32) for name, each in values.items()}


def _taken(step: Step, at: Lanes) -> NDArray[np.bool_]:
    """Return for which lanes the guard is true."""
    values = step.guard[at]
    return ~values if step.instruction.guard.negated else values


def _where(step: Step, at: Lanes) -> Lanes | None:
    """Return the lanes for which the guard is true; None: no lane."""
    taken = _taken(step, at)
    if taken.all():
        return at
    if not taken.any():
        return None
    return np.flatnonzero(taken) if isinstance(at, slice) else at[taken]
