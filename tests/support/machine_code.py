"""The machine code in the objects that setup.py built: of every kernel and chip its instructions and what it takes.

An object holds, in its section .nv_fatbin, one ELF file ("cubin") for each chip; setup.py's record beside it holds what
`ptxas -v` said. Only Python reads them here, so that no disassembler is needed.
"""

import json
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

OBJECTS = Path(__file__).parents[2] / "build" / "kernels" / "cuda"
# The low 9 bits of an instruction, the same from sm_80 to sm_120 (the next three give the operand kinds).
LDG, STG, LDL, STL = 0x181, 0x186, 0x183, 0x187
_WIDTHS = (1, 1, 2, 2, 4, 8, 16)  # bytes of a load or store, by bits 73 to 75
_FATBIN, _CUBIN, _COMPRESSED = 0xBA55ED50, 2, 0xA000
_SYSTEMS = 1024  # bytes of shared memory per block that the system reserves, from 9.0 on
_MOST_THREADS = 0x05  # the attribute of .nv.info.<kernel> for __launch_bounds__

Words = list[tuple[int, int]]


@dataclass(frozen=True)
class Kernel:
    """One kernel for one chip.

    name: with its template arguments, without namespaces. threads: the most of a block. shared: bytes of shared
    memory without what a launch adds. words: two of 64 bits an instruction.
    """

    source: str
    name: str
    arch: str
    threads: int
    registers: int
    stack: int
    spilled: int
    shared: int
    words: Words = field(repr=False)

    @property
    def function(self) -> str:
        return self.name.partition("<")[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The template's arguments, flattened."""
        return tuple(re.findall(r"[^,<>]+", self.name.partition("<")[2].replace(" ", "")))

    @cached_property
    def stores(self) -> Counter[int]:
        """Return width of a global store in bytes -> number of such instructions."""
        return _widths(self.words, STG)

    @cached_property
    def loads(self) -> Counter[int]:
        return _widths(self.words, LDG)


def _widths(words: Words, opcode: int) -> Counter[int]:
    return Counter(_WIDTHS[high >> 9 & 7] for low, high in words if low & 0x1FF == opcode)


def sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Return name -> offset and size in bytes of the sections of a 64-bit ELF file."""
    first, size, count, names = (
        struct.unpack_from(kind, elf, at)[0]
        for kind, at in (("<Q", 0x28), ("<H", 0x3A), ("<H", 0x3C), ("<H", 0x3E))
    )
    headers = [struct.unpack_from("<IIQQQQ", elf, first + number * size) for number in range(count)]
    found = {}
    for name_at, _, _, _, offset, length in headers:
        begin = headers[names][4] + name_at
        found[elf[begin : elf.index(b"\0", begin)].decode()] = (offset, length)
    return found


def words_of(cubin: bytes) -> dict[str, Words]:
    """Return mangled name -> instructions of each kernel of a cubin."""
    return {
        name.removeprefix(".text."): [*struct.iter_unpack("<QQ", cubin[offset : offset + length])]
        for name, (offset, length) in sections(cubin).items()
        if name.startswith(".text.")
    }


def cubins(built: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield chip ("90" for "sm_90a") and cubin for each cubin of an object file; PTX is skipped."""
    offset, length = sections(built)[".nv_fatbin"]
    at, end = offset, offset + length
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", built, at)
        assert magic == _FATBIN, f"no fat binary at {at}: {magic:#x}"
        entry, past = at + header, at + header + size
        while entry < past:
            kind, _, own, bytes_ = struct.unpack_from("<HHIQ", built, entry)
            (arch,) = struct.unpack_from("<I", built, entry + 28)
            (flags,) = struct.unpack_from("<Q", built, entry + 40)
            if kind == _CUBIN:
                assert not flags & _COMPRESSED, "nvcc compressed a cubin, and this reader unpacks none"
                yield str(arch), built[entry + own : entry + own + bytes_]
            entry += own + bytes_
        at = (past + 7) // 8 * 8


def most_threads(cubin: bytes, offset: int, length: int) -> int:
    """Return the thread limit in a section .nv.info.<kernel>: entries of format, attribute, and value or its size."""
    at, end = offset, offset + length
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == 4:
            if attribute == _MOST_THREADS:
                x, y, z = struct.unpack_from("<III", cubin, at)
                return x * y * z
            at += value
    raise AssertionError("a kernel without __launch_bounds__")


def kernels(folder: Path = OBJECTS) -> list[Kernel]:
    """Return all kernels of all object files in `folder`, for each chip."""
    found = []
    for path in sorted(folder.glob("*.o")):
        said = json.loads(path.with_suffix(".json").read_text())["kernels"]
        for arch, cubin in cubins(path.read_bytes()):
            places = sections(cubin)
            for mangled, words in words_of(cubin).items():
                [taken] = [
                    each
                    for each in said
                    if each["kernel"] == mangled and re.fullmatch(rf"sm_{arch}[af]?", each["arch"])
                ]
                own = places.get(f".nv.shared.{mangled}", (0, 0))[1]
                if own and int(arch) >= 90:
                    own -= _SYSTEMS  # does not count towards the block's limit
                threads = most_threads(cubin, *places[f".nv.info.{mangled}"])
                what = (taken["registers"], taken["stack"], taken["spilled"], own)
                found.append(Kernel(f"{path.stem}.cu", mangled, taken["arch"], threads, *what, words))
    names = _readable([each.name for each in found])
    return [replace(each, name=name) for each, name in zip(found, names, strict=True)]


def _readable(mangled: list[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt", "--no-params"], input="\n".join(mangled), capture_output=True, text=True, check=True
    )
    return [re.sub(r"(\(anonymous namespace\)|\w+)::", "", name) for name in done.stdout.splitlines()]
