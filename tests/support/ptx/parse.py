"""PTX text as kernels: their parameters, shared variables, registers and instructions.

The grammar is the part of the PTX ISA that nvcc uses for kernels without calls; anything else is refused.
"""

import re
from dataclasses import dataclass, field


class PtxError(Exception):
    """The text is PTX that the interpreter does not know."""


@dataclass(frozen=True)
class Register:
    """A register, or a predicate that is negated when read."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Special:
    """A read-only special register, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant: its bits in the width of the instruction that reads it."""

    bits: int
    kind: str
    """`f` of 0f and 0d constants, `i` of integers."""


@dataclass(frozen=True)
class Symbol:
    """The address of a parameter or of a shared variable."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]"""

    base: Register | Symbol | Immediate
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    parts: tuple["Operand", ...]


@dataclass(frozen=True)
class Pair:
    """a|b: a result and a predicate result."""

    first: Register
    second: Register


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair


@dataclass(frozen=True)
class Instruction:
    """One instruction; `form` is its opcode with all modifiers."""

    line: int
    text: str
    form: str
    operands: tuple[Operand, ...]
    guard: Register | None = None


@dataclass(frozen=True)
class Variable:
    """A parameter or a shared variable; size 0: dynamic shared memory."""

    name: str
    size: int
    align: int


@dataclass
class Kernel:
    """A .entry of the module."""

    name: str
    parameters: list[Variable]
    most_threads: int | None
    """The largest number of threads per block (.maxntid)."""
    registers: dict[str, str] = field(default_factory=dict)
    """Register prefix -> type: {"%r": "b32"}."""
    shared: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass
class Module:
    """The PTX module of one .cu file."""

    target: str
    kernels: dict[str, "KernelText"]
    shared: list[Variable]

    def kernel(self, name: str) -> Kernel:
        """Return the parsed kernel, with only the module variables that it uses."""
        return self.kernels[name].parsed(self.shared)


@dataclass(frozen=True)
class KernelText:
    """The text of a kernel; parsed on demand, because most kernels of a file are not needed."""

    name: str
    parameters: str
    directives: str
    body: str
    line: int

    def parsed(self, module_shared: list[Variable]) -> Kernel:
        if unknown := re.sub(
            r"\.(maxntid|minnctapersm|reqntid|maxnreg)[\s\d,]+", "", self.directives
        ).strip():
            raise PtxError(f"{self.name}: unknown directive {unknown!r}")
        most = re.search(r"\.maxntid\s+(\d+),\s*(\d+),\s*(\d+)", self.directives)
        threads = int(most[1]) * int(most[2]) * int(most[3]) if most else None
        kernel = Kernel(self.name, _parameters(self.parameters), threads)
        _Body(kernel).read(self.body, self.line)
        named = set(re.findall(r"[\w$]+", self.body))
        kernel.shared += [each for each in module_shared if each.name in named]
        return kernel


_ENTRY = re.compile(
    r"^(?:\.visible\s+|\.weak\s+)?\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>.*?)\)(?P<directives>[^{]*)\{",
    re.DOTALL | re.MULTILINE,
)
_STATEMENT = re.compile(r"\s*(?:(?P<label>[$\w]+):(?!:)|(?P<brace>[{}])|(?P<statement>[^;]+);)")
_VARIABLE = re.compile(
    r"\.(?:shared|param)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?$"
)


def parse(text: str) -> Module:
    """Parse a module; its kernels are parsed on demand."""
    text = re.sub(r"//[^\n]*", "", text)
    target = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    if target is None:
        raise PtxError("no .target")
    kernels: dict[str, KernelText] = {}
    shared: list[Variable] = []
    outside, begin = "", 0
    while entry := _ENTRY.search(text, begin):
        outside += text[begin : entry.start()]
        begin = _closing(text, entry.end())
        body = text[entry.end() : begin - 1]
        line = text.count("\n", 0, entry.end()) + 1
        kernels[entry["name"]] = KernelText(
            entry["name"], entry["parameters"], entry["directives"], body, line
        )
    outside += text[begin:]
    for statement in re.sub(r"^\.(version|target|address_size)[^\n]*", "", outside, flags=re.MULTILINE).split(
        ";"
    ):
        statement = " ".join(statement.split())
        if re.match(r"(\.extern )?\.shared ", statement):
            shared.append(_variable(statement.removeprefix(".extern ")))
        elif statement:
            raise PtxError(f"no part of a module that is known: {statement[:100]!r}")
    return Module(target[1], kernels, shared)


def _closing(text: str, begin: int) -> int:
    """Return the position of the brace that closes the block opened before `begin`."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return begin + brace.end()
    raise PtxError("a block that is not closed")


def _variable(text: str) -> Variable:
    found = _VARIABLE.match(text)
    if found is None:
        raise PtxError(f"no variable that is known: {text!r}")
    each = bits_of(found["type"]) // 8
    count = 1 if found["count"] is None else int(found["count"] or 0)
    return Variable(found["name"], each * count, int(found["align"] or each))


def _parameters(text: str) -> list[Variable]:
    return [_variable(" ".join(each.split())) for each in text.split(",") if each.strip()]


def bits_of(kind: str) -> int:
    """Return the number of bits of a type such as u32."""
    found = re.fullmatch(r"[busf](8|16|32|64)", kind)
    if found is None:
        raise PtxError(f"no type that is known: {kind!r}")
    return int(found[1])


class _Body:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def read(self, body: str, line: int) -> None:
        at, counted, body = 0, 0, body.rstrip()
        while at < len(body):
            match = _STATEMENT.match(body, at)
            if match is None:
                raise PtxError(f"no statement that is known: {body[at:].strip()[:100]!r}")
            at = match.end()
            if match["label"]:
                self.kernel.labels[match["label"]] = len(self.kernel.code)
            elif match["statement"]:
                line += body.count("\n", counted, match.start("statement"))
                counted = match.start("statement")
                self._statement(" ".join(match["statement"].split()), line)

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg "):
            self._registers(text)
        elif text.startswith(".shared "):
            self.kernel.shared.append(_variable(text))
        elif text.startswith(".pragma ") or not text:
            return
        elif text.startswith("."):
            raise PtxError(f"line {line}: no statement that is known: {text!r}")
        else:
            self.kernel.code.append(self._instruction(text, line))

    def _registers(self, text: str) -> None:
        found = re.fullmatch(r"\.reg \.(\w+) (%?\w+)(?:<\d+>)?", text)
        if found is None:
            raise PtxError(f"no registers that are known: {text!r}")
        if self.kernel.registers.setdefault(found[2], found[1]) != found[1]:
            raise PtxError(f"{found[2]} is declared twice, as .{found[1]} too")

    def _instruction(self, text: str, line: int) -> Instruction:
        found = re.fullmatch(r"(?:@(!?)(%?\w+) )?([\w.:]+)(?: (.*))?", text)
        if found is None:
            raise PtxError(f"line {line}: no instruction that is known: {text!r}")
        guard = Register(found[2], bool(found[1])) if found[2] else None
        operands = tuple(map(self._operand, _split(found[4] or "")))
        return Instruction(line, text, found[3], operands, guard)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(map(self._operand, _split(text[1:-1]))))
        if text.startswith("["):
            found = re.fullmatch(r"\[([\w%$]+)(?:(\+-?)(\d+))?\]", text.replace(" ", ""))
            if found is None:  # an operand of an unknown instruction
                return Symbol(text)
            return Address(self._operand(found[1]), int(f"{found[2][1:]}{found[3]}") if found[2] else 0)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._register(first), self._register(second))
        if re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.[xyz]|%laneid", text):
            return Special(text)
        if found := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", text):
            return Immediate(int(found[2], 16), "f")
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            return Immediate(int(text, 0), "i")
        if text.startswith(("%", "!%")):
            return self._register(text)
        if text.removeprefix("!") in self.kernel.registers:
            return self._register(text)
        return Symbol(text)

    def _register(self, text: str) -> Register:
        name = text.removeprefix("!")
        if register_type(self.kernel, name) is None:
            raise PtxError(f"no register that is declared: {text}")
        return Register(name, text.startswith("!"))


def register_type(kernel: Kernel, name: str) -> str | None:
    """Return the declared type of a register, such as `pred` or `b32`; None if it is not declared."""
    return kernel.registers.get(name.rstrip("0123456789"), kernel.registers.get(name))


def _split(text: str) -> list[str]:
    """Split a list at the commas outside of braces and brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts
