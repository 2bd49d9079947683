"""ldmatrix and mma.sync, by the fragment layouts of the PTX ISA."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tests.support.ptx import parse

if TYPE_CHECKING:
    from tests.support.ptx.machine import Lanes, Machine

Run = Callable[["Lanes"], None]


def _load_matrices(machine: "Machine", instruction: parse.Instruction) -> Run:
    """Compile ldmatrix.x4: lanes 8 i to 8 i + 7 give the row addresses of matrix i.

    Its element [row][column] ([column][row] if transposed) goes to half column % 2 of register i of lane
    row * 4 + column / 2.
    """
    from tests.support.ptx.instructions import access, effective, writer

    to, source = instruction.operands
    assert isinstance(to, parse.Vector) and len(to.parts) == 4, instruction.text
    writes = [writer(machine, each, "b32") for each in to.parts]
    address, transposed = effective(machine, source), ".trans." in instruction.form

    def run(at: "Lanes") -> None:
        memory, index = access(machine, ".shared", address(at), 16, at, write=False)("<u2")
        rows = memory[index[:, None] + np.arange(8)].reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        if transposed:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32)[..., :4].reshape(-1, 4, 32)
        for which, write in enumerate(writes):
            write(at, words[:, which].reshape(-1))

    return run


def _numbers(words: NDArray[np.uint32], kind: str) -> NDArray[np.float64]:
    """Convert words [warp, lane] to numbers [warp, lane, half]."""
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _multiply(machine: "Machine", instruction: parse.Instruction) -> Run:
    """Compile mma.m16n8k16; products and sums are exact, with one rounding at the end.

    With g = lane / 4 and t = lane % 4, a lane holds: of A rows g (registers 0, 2) and g + 8 (1, 3), columns 2 t and
    2 t + 1 (0, 1) and 2 t + 8 and 2 t + 9 (2, 3); of B column g, rows 2 t and 2 t + 1 (register 0) and 2 t + 8 and
    2 t + 9 (1); of the sums rows g (0, 1) and g + 8 (2, 3), columns 2 t and 2 t + 1.
    """
    from tests.support.ptx.instructions import reader, writer

    kind = instruction.form.split(".")[7]
    to, left, right, sums = instruction.operands
    for operand, count in ((to, 4), (left, 4), (right, 2), (sums, 4)):
        assert isinstance(operand, parse.Vector) and len(operand.parts) == count, instruction.text
    writes = [writer(machine, each, "f32") for each in to.parts]
    of_left, of_right = (
        [reader(machine, each, "b32") for each in operand.parts] for operand in (left, right)
    )
    of_sums = [reader(machine, each, "f32") for each in sums.parts]

    def run(at: "Lanes") -> None:
        def lanes(read: Callable[["Lanes"], NDArray[np.generic]]) -> NDArray[np.generic]:
            own = machine.count if isinstance(at, slice) else len(at)
            return np.broadcast_to(read(at), (own,)).reshape(-1, 32)

        words = np.stack([_numbers(lanes(read), kind) for read in of_left], 1)  # warp, register, lane, half
        # Register i + 2 j has rows g + 8 i and columns 2 t + half + 8 j.
        a = words.reshape(-1, 2, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4, 5).reshape(-1, 16, 16)
        words = np.stack([_numbers(lanes(read), kind) for read in of_right], 1)
        b = words.reshape(-1, 2, 8, 4, 2).transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8)
        given = np.stack([lanes(read) for read in of_sums], -1).astype(np.float64)  # warp, lane, register
        made = (a @ b).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 32, 4) + given
        for which, write in enumerate(writes):
            write(at, made[..., which].reshape(-1).astype(np.float32))

    return run


FORMS: dict[str, Callable[["Machine", parse.Instruction], Run]] = {
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": _load_matrices,
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": _load_matrices,
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": _multiply,
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": _multiply,
}
