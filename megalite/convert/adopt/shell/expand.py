"""Expand the words of a shell script: variables, arrays, defaults and integer arithmetic. No command is executed."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megalite.convert.adopt.shell.tokens import bracket_end, quote_end, tokens

LONGEST = 1 << 17
"""Characters of a value; a longer one is no launch script's."""
_MOST_WORK = 1 << 23
"""Characters that all expansions of a script may read and make: the longest public ones need 1 in 100 of it."""
_OPEN, _CLOSE, _SPACE = "\ue000", "\ue001", "\ue002"
_UNKNOWN = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*])(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.Div: lambda left, right: int(left / right) if abs(left) < 2**52 else left // right,
}


class TooLong(Exception):
    """An expansion grows without bound."""


@dataclass
class Variables:
    """The script's variables. A text or, for an array, a list. named: what could not be known, in order."""

    values: dict[str, str | list[str]] = field(default_factory=dict)
    named: list[str] = field(default_factory=list)
    work: int = 0

    def spend(self, characters: int) -> None:
        self.work += characters
        if self.work > _MOST_WORK:
            raise TooLong(f"what its expansions read and make grows beyond {_MOST_WORK:,} characters")

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        return value[0] if isinstance(value, list) and value else "" if isinstance(value, list) else value

    def set(self, name: str, value: str | list[str], *, append: bool = False) -> None:
        old = self.values.get(name)
        if append and old is not None:
            if isinstance(old, list):
                value = [*old, *(value if isinstance(value, list) else [value])]
            else:
                value = [old, *value] if isinstance(value, list) else old + value
        if sum(map(len, value)) > LONGEST:
            raise TooLong(f"the value of {name} grows beyond {LONGEST:,} characters")
        self.values[name] = value

    def unknown(self, source: str, why: str = "") -> str:
        """Return the mark of a text that only a run of the script knows, and name it."""
        source = _clean(source)
        if why and (note := f"{source[:80]}: {why}") not in self.named:
            self.named.append(note)
        return f"{_OPEN}{_SPACE.join(source.split())}{_CLOSE}"


def is_known(text: str) -> bool:
    return _OPEN not in text


def unknown_parts(text: str) -> list[str]:
    return [part.replace(_SPACE, " ") for part in _UNKNOWN.findall(text)]


def as_source(text: str) -> str:
    """Return an expanded text with its unknown parts as the script writes them."""
    return text.translate({ord(_OPEN): None, ord(_CLOSE): None, ord(_SPACE): " "})


def _clean(script: str) -> str:
    return script.translate({ord(mark): None for mark in (_OPEN, _CLOSE, _SPACE)})


def split_words(word: str, variables: Variables) -> list[str]:
    """Return the words that a raw word expands to: unquoted values are split at white space."""
    parts: list[str] = [""]
    real = False  # whether an empty word stands there, as in ""
    for piece, quoted, separate in _pieces(word, variables):
        variables.spend(sum(map(len, piece)))
        if separate:  # the words of "${array[@]}"
            for number, item in enumerate(piece):
                parts += [] if number == 0 else [""]
                parts[-1] += item
            real = real or bool(piece)
        elif quoted:
            parts[-1] += " ".join(piece)
            real = real or bool(piece)
        else:
            text = " ".join(piece)
            words = text.split()
            if text[:1].isspace() and parts[-1]:
                parts.append("")
            for number, item in enumerate(words):
                parts += [] if number == 0 else [""]
                parts[-1] += item
            if words and text[-1:].isspace():
                parts.append("")
        if sum(map(len, parts)) > LONGEST:
            raise TooLong(f"the word {word[:40]} grows beyond {LONGEST:,} characters")
    return [part for part in parts if part] or ([""] if real else [])


def joined(word: str, variables: Variables) -> str:
    """Return a word without splitting, as in an assignment or a heredoc's line."""
    pieces = [" ".join(piece) for piece, _, _ in _pieces(word, variables)]
    variables.spend(sum(map(len, pieces)))
    if sum(map(len, pieces)) > LONGEST:
        raise TooLong(f"the value {word[:40]} grows beyond {LONGEST:,} characters")
    return "".join(pieces)


def array_items(content: str, variables: Variables) -> list[str]:
    """Return the items of `( ... )`."""
    words = [token.text for token in tokens(content) if token.kind == "word"]
    return [item for word in words for item in split_words(word, variables)]


def heredoc_text(body: str, variables: Variables) -> str:
    """Return a heredoc's text with its variables expanded."""
    return joined('"' + body.replace("\\", "\\\\").replace('"', '\\"') + '"', variables)


def _pieces(word: str, variables: Variables, quoted: bool = False) -> Iterator[tuple[list[str], bool, bool]]:
    """Yield (texts, whether quoted, whether the texts are separate words)."""
    position = 0
    variables.spend(len(word))
    while position < len(word):
        letter = word[position]
        if letter == "\\" and position + 1 < len(word):
            following = word[position + 1]
            kept = "" if following == "\n" else following
            yield [letter + kept if quoted and following not in '"$`\\\n' else kept], True, False
            position += 2
        elif letter == "'" and not quoted:
            end = quote_end(word, position)
            yield [word[position + 1 : end - 1]], True, False
            position = end
        elif letter == '"' and not quoted:
            end = quote_end(word, position)
            inner = word[position + 1 : end - 1]
            if not inner:
                yield [""], True, False
            yield from _pieces(inner, variables, quoted=True)
            position = end
        elif letter == "`":
            end = quote_end(word, position)
            yield [variables.unknown(word[position:end], "a command, not executed")], quoted, False
            position = end
        elif letter == "$":
            texts, separate, position = _dollar(word, position, variables)
            yield texts, quoted, separate and quoted
        else:
            end = position + 1
            while end < len(word) and word[end] not in "\\'\"`$":
                end += 1
            yield [_clean(word[position:end])], True, False
            position = end


def _dollar(word: str, start: int, variables: Variables) -> tuple[list[str], bool, int]:
    """Return (texts, whether they are an array's items, the position behind) of what $ begins."""
    if word.startswith("$((", start):
        end = bracket_end(word, start + 1)
        return [_arithmetic(word[start:end], variables)], False, end
    if word.startswith("$(", start):
        end = bracket_end(word, start + 1)
        return [variables.unknown(word[start:end], "a command, not executed")], False, end
    if word.startswith("${", start):
        end = bracket_end(word, start + 1)
        texts, separate = _braces(word[start:end], variables)
        return texts, separate, end
    name = _NAME.match(word, start + 1)
    if name is None:
        return ["$"], False, start + 1
    if name[0] in "@*":
        return [], False, name.end()  # arguments of the script's own, of which there are none
    value = variables.values.get(name[0])
    text = variables.unknown(f"${name[0]}") if value is None else variables.text(name[0]) or ""
    return [text], False, name.end()


def _braces(source: str, variables: Variables) -> tuple[list[str], bool]:
    """Return the texts of ${...}, and whether they are an array's items."""
    form = _BRACES.fullmatch(source[2:-1])
    if form is None:
        return [variables.unknown(source, "a form of ${...} that is not read")], False
    name, index, action, word = form.groups()
    if name in ("@", "*"):
        return [], False
    value = variables.values.get(name)
    if index is not None and index not in ("@", "*", "0") and isinstance(value, list):
        number = int(index) if index.isdecimal() and len(index) < 9 else len(value)
        value = value[number] if number < len(value) else None
    if action is None:
        if value is None:
            return ([], True) if index in ("@", "*") else ([variables.unknown(source)], False)
        if index in ("@", "*") and isinstance(value, list):
            return value, index == "@"
        return [value if isinstance(value, str) else value[0] if value else ""], False
    text = " ".join(value) if isinstance(value, list) else value
    empty = text is None or (action.startswith(":") and text == "")
    if action[-1] == "+":
        return ([] if empty else [joined(word, variables)]), False
    if not empty:
        return [text or ""], False
    if action[-1] == "?":
        return [variables.unknown(source)], False
    default = joined(word, variables)
    if action[-1] == "=":
        variables.set(name, default)
    return [default], False


def _arithmetic(source: str, variables: Variables) -> str:
    """Return the value of $((...)): whole numbers, + - * / %, brackets and variables."""
    if "`" in source or "$(" in source[3:]:
        return variables.unknown(source, "a command, not executed")
    inner = re.sub(r"(?<![\w${])[A-Za-z_]\w*", lambda name: "${" + name[0] + "}", source[3:-2])
    text = joined(inner, variables) if len(inner) < 1000 else _OPEN
    if not is_known(text) or not re.fullmatch(r"[\d\s+\-*/%()]*", text) or not text.strip():
        return variables.unknown(source)
    try:
        return str(_value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, KeyError, MemoryError):
        return variables.unknown(source, "arithmetic that is not read")


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1 << 63:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        result = _ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
        if abs(result) < 1 << 63:
            return result
    raise ValueError
