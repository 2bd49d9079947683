"""Read a launch script: which commands it would start, with their variables expanded. Nothing is executed.

`if` and `case` follow the branch whose condition is known and are skipped otherwise; a `for` over several words is read
once with its variable unknown; `while` is skipped. Every such decision, and every command substitution, is named.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megalite.convert.adopt.shell.conditions import condition, is_test
from megalite.convert.adopt.shell.expand import (
    TooLong,
    Variables,
    array_items,
    as_source,
    heredoc_text,
    is_known,
    joined,
    split_words,
)
from megalite.convert.adopt.shell.tokens import ShellSyntax, Token, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_NAMED = {
    "source": "another file, not read",
    ".": "another file, not read",
    "eval": "read as text, not executed",
}
_DEEPEST = 40
_MOST_WORDS = 50_000


@dataclass(frozen=True)
class ShellCommand:
    """A command with its expanded words; unknown parts are marked (`shell_expand`)."""

    words: list[str]
    line: int


@dataclass
class ScriptText:
    """The content of a script. files: texts that it writes by `cat <<WORD > file`. notes: what was not followed."""

    commands: list[ShellCommand] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_script(text: str, values: Mapping[str, str]) -> ScriptText:
    """Return the commands of a script. values: variables set from outside. Raises ShellSyntax, TooLong."""
    try:
        reader = _Reader(list(tokens(text)), Variables(dict(values)))
        reader.block((), active=True)
    except RecursionError:
        raise ShellSyntax("it is nested too deeply") from None
    reader.script.notes += [note for note in reader.variables.named if note not in reader.script.notes]
    return reader.script


class _Reader:
    def __init__(self, script_tokens: list[Token], variables: Variables):
        self.tokens, self.variables = script_tokens, variables
        self.script = ScriptText()
        self.position = self.depth = self.words = 0
        self.functions: dict[str, int] = {}
        self.target: str | None = None
        self.result: bool | None = True  # of the last command, as far as it is known

    def block(self, stops: Collection[str], *, active: bool) -> str:
        """Read statements up to a word of `stops`, and return it; "" at the end of the script."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ShellSyntax(f"it is nested deeper than {_DEEPEST}")
        joint = ""
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.text in stops and token.kind in ("word", "operator"):
                self.position += 1
                self.depth -= 1
                return token.text
            if token.kind == "heredoc":
                self._heredoc(token, active)
                self.position += 1
            elif token.kind == "operator" and token.text != "(":
                self.position += 1
                joint = token.text
            else:
                runs = active and not (joint == "&&" and self.result is False)
                runs = runs and not (joint == "||" and self.result is not False)
                if active and joint in ("&&", "||") and self.result is None:
                    runs = False
                    self._note(token, "its condition is known only in a run; skipped")
                self.statement(active=runs)
                joint = ""
        if stops:
            raise ShellSyntax(f"{' or '.join(sorted(stops))} is missing at its end")
        self.depth -= 1
        return ""

    def statement(self, *, active: bool) -> None:
        """Read one statement: a compound one, a function, or a simple command."""
        token = self.tokens[self.position]
        compound = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "{": self._group,
            "(": self._group,
        }.get(token.text)
        following = [later.text for later in self.tokens[self.position + 1 : self.position + 3]]
        if compound is not None and (token.kind == "word" or token.text == "("):
            self.position += 1
            compound(active)
            self.result = True
        elif token.text == "function" or following == ["(", ")"]:
            self._function(token)
        else:
            self._simple(active)

    def _if(self, active: bool) -> None:
        settled = not active
        end = "if"
        while end != "fi":
            if end == "else":
                end = self.block(("fi",), active=not settled)
                continue
            tests, first = self._until("then"), self.tokens[min(self.position, len(self.tokens)) - 1]
            truth = None if settled else condition(tests, self.variables)
            if not settled:
                shown = " ".join(token.text for token in tests if token.text != "\n").rstrip("; ")[:80]
                answer = {True: "taken", False: "not taken", None: "known only in a run; no branch is read"}
                self._note(first, f"{end} {shown}: {answer[truth]}")
            end = self.block(("elif", "else", "fi"), active=not settled and truth is True)
            settled = settled or truth is not False

    def _for(self, active: bool) -> None:
        header = self._until("do")
        words = [token.text for token in header if token.kind == "word"]
        if active and words:
            items = [item for word in words[2:] for item in split_words(word, self.variables)]
            known = len(items) == 1 and is_known(items[0])
            value = items[0] if known else self.variables.unknown(f"${words[0]}")
            if not known:
                self._note(header[0], f"for {words[0]}: its body is read once, with ${words[0]} unknown")
            self.variables.set(words[0], value)
        self.block(("done",), active=active and bool(words))

    def _while(self, active: bool) -> None:
        header = self._until("do")
        if active and header:
            self._note(header[0], "while: its body is skipped")
        self.block(("done",), active=False)

    def _case(self, active: bool) -> None:
        header = self._until("in")
        subject = joined(header[0].text, self.variables) if active and header else ""
        known = active and bool(header) and is_known(subject)
        if active and header:
            self._note(header[0], f"case {header[0].text}: " + ("its match is read" if known else "skipped"))
        end, settled = ";;", not known
        while end != "esac":
            patterns = [token.text for token in self._until(")", "esac") if token.kind == "word"]
            if self.tokens[self.position - 1].text == "esac":
                return
            fits = not settled and any(
                fnmatchcase(subject, joined(each, self.variables)) for each in patterns
            )
            end = self.block((";;", "esac"), active=fits)
            settled = settled or fits

    def _group(self, active: bool) -> None:
        closing = ")" if self.tokens[self.position - 1].text == "(" else "}"
        self.block((closing,), active=active)

    def _function(self, token: Token) -> None:
        self.position += 1
        name = token.text
        if name == "function":
            name = self.tokens[self.position].text if self.position < len(self.tokens) else ""
            self.position += 1
        self._until("{")
        self.functions[name] = self.position
        self.block(("}",), active=False)

    def _simple(self, active: bool) -> None:
        first = self.tokens[self.position]
        raw: list[str] = []
        self.target = None
        while self.position < len(self.tokens) and self.tokens[self.position].kind in ("word", "redirect"):
            token = self.tokens[self.position]
            self.position += 1
            if token.kind == "word":
                raw.append(token.text)
            elif self.position < len(self.tokens) and self.tokens[self.position].kind == "word":
                if active and token.text in (">", ">>", ">|"):
                    self.target = joined(self.tokens[self.position].text, self.variables)
                self.position += 1
        if not active:
            return
        if not raw and self.position < len(self.tokens) and self.tokens[self.position] is first:
            self.position += 1  # an operator that no command begins with
            return
        self.result = condition([Token("word", word, 0) for word in raw], self.variables)
        if is_test(raw) or raw[:1] == ["!"]:
            return
        self.result = True if self.result is None else self.result
        self._command(raw, first)

    def _command(self, raw: list[str], first: Token) -> None:
        declares = bool(raw) and raw[0] in _DECLARATIONS
        rest = raw[1:] if declares else raw
        while rest and (form := _ASSIGNMENT.fullmatch(rest[0])):
            self._assign(form[1], form[3], append=bool(form[2]))
            rest = rest[1:]
        if declares or not rest:
            return
        words = [word for each in rest for word in split_words(each, self.variables)]
        self.words += len(words)
        if self.words > _MOST_WORDS:
            raise TooLong(f"its commands have more than {_MOST_WORDS:,} words")
        if not words:
            return
        if words[0] in self.functions:
            self._call(words[0], first)
            return
        if words[0] in _NAMED:
            self._note(first, f"{as_source(' '.join(words))[:80]}: {_NAMED[words[0]]}")
        self.script.commands.append(ShellCommand(words, first.line))

    def _call(self, name: str, first: Token) -> None:
        """Read the body of a function where it is called; one that calls itself ends at the deepest level."""
        here = self.position
        self.position = self.functions[name]
        self.block(("}",), active=True)
        self.position = here

    def _assign(self, name: str, raw: str, *, append: bool) -> None:
        if raw.startswith("(") and raw.endswith(")"):
            self.variables.set(name, array_items(raw[1:-1], self.variables), append=append)
        else:
            self.variables.set(name, joined(raw, self.variables), append=append)

    def _heredoc(self, token: Token, active: bool) -> None:
        if active and self.target is not None:
            body = heredoc_text(token.heredoc, self.variables) if token.expands else token.heredoc
            self.script.files[self.target] = body

    def _until(self, *words: str) -> list[Token]:
        """Return the tokens before the next one of `words`, and step behind it."""
        start = self.position
        while self.position < len(self.tokens):
            self.position += 1
            if self.tokens[self.position - 1].text in words:
                return self.tokens[start : self.position - 1]
        raise ShellSyntax(f"{' or '.join(words)} is missing at its end")

    def _note(self, token: Token, text: str) -> None:
        self.script.notes.append(f"line {token.line}: {text}")
