"""Split a shell script into words and operators, as bash does; nothing is expanded or executed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATORS = ("&>>", "&&", "||", ";;", "&>", ";", "|", "&", "\n", "(", ")")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|<>|>\||<|>)")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class ShellSyntax(Exception):
    """The text is no shell script; the message says why and where."""


@dataclass(frozen=True)
class Token:
    """A raw word, an operator, or a redirection. heredoc: the text behind <<WORD; expands: whether it is expanded."""

    kind: str
    text: str
    line: int
    heredoc: str = ""
    expands: bool = True


def tokens(script: str) -> Iterator[Token]:
    """Yield the words and operators of a script. Raises ShellSyntax for a quote or bracket without its end."""
    position, line = 0, 1
    waiting: list[tuple[str, bool, int]] = []
    while position < len(script):
        letter = script[position]
        if script.startswith("\\\n", position):
            position, line = position + 2, line + 1
        elif letter in " \t\r":
            position += 1
        elif letter == "#":
            position = _line_end(script, position)
        elif redirection := _REDIRECTION.match(script, position):
            operator = redirection[0].lstrip("0123456789")
            position = redirection.end()
            if operator in ("<<", "<<-"):
                while script[position : position + 1] in (" ", "\t"):
                    position += 1
                end = word_end(script, position)
                word = script[position:end]
                waiting.append((word.strip("'\"\\"), word[:1] not in ("'", '"', "\\"), line))
                position = end
            else:
                yield Token("redirect", operator, line)
        elif operator := next((each for each in _OPERATORS if script.startswith(each, position)), ""):
            position += len(operator)
            yield Token("redirect" if operator.startswith("&>") else "operator", operator, line)
            if operator == "\n":
                line += 1
                for end_word, expands, at in waiting:
                    body, position = _heredoc(script, position, end_word)
                    line += body.count("\n") + 1
                    yield Token("heredoc", end_word, at, body, expands)
                waiting.clear()
        else:
            end = word_end(script, position)
            yield Token("word", script[position:end], line)
            line += script.count("\n", position, end)
            position = end


def word_end(script: str, start: int) -> int:
    """Return the position behind the word that begins at `start`."""
    position = start
    while position < len(script):
        letter = script[position]
        if letter == "\\":
            position += 2
        elif letter in "'\"`":
            position = quote_end(script, position)
        elif letter == "$" and script[position + 1 : position + 2] in ("(", "{"):
            position = bracket_end(script, position + 1)
        elif letter == "(" and _ARRAY.fullmatch(script, start, position):
            return bracket_end(script, position)
        elif letter.isspace() or letter in ";&|()<>":
            break
        else:
            position += 1
    return min(position, len(script))


def quote_end(script: str, start: int) -> int:
    """Return the position behind the quoted text that begins at `start`. Raises ShellSyntax."""
    quote, position = script[start], start + 1
    while position < len(script):
        letter = script[position]
        if letter == quote:
            return position + 1
        if letter == "\\" and quote != "'":
            position += 2
        elif quote == '"' and letter == "$" and script[position + 1 : position + 2] in ("(", "{"):
            position = bracket_end(script, position + 1)
        else:
            position += 1
    raise ShellSyntax(f"line {1 + script.count(chr(10), 0, start)}: the quote {quote} has no end")


def bracket_end(script: str, start: int) -> int:
    """Return the position behind the bracket that closes the one at `start`. Raises ShellSyntax."""
    waiting, position = [_CLOSING[script[start]]], start + 1
    while position < len(script):
        letter = script[position]
        if letter == "\\":
            position += 1
        elif letter in "'\"`":
            position = quote_end(script, position) - 1
        elif letter == "#" and script[position - 1].isspace():
            position = _line_end(script, position) - 1
        elif letter in "({":
            waiting.append(_CLOSING[letter])
        elif letter == waiting[-1]:
            waiting.pop()
            if not waiting:
                return position + 1
        position += 1
    raise ShellSyntax(f"line {1 + script.count(chr(10), 0, start)}: the bracket {script[start]} has no end")


def _heredoc(script: str, start: int, end_word: str) -> tuple[str, int]:
    """Return the text from `start` to the line that is `end_word`, and the position behind that line."""
    position = start
    while position < len(script):
        end = _line_end(script, position)
        if script[position:end].strip("\t\r") == end_word:
            return script[start:position], end + 1
        position = end + 1
    return script[start:], len(script)


def _line_end(script: str, start: int) -> int:
    end = script.find("\n", start)
    return len(script) if end < 0 else end
