"""The parser of command-line arguments, and types of arguments, that the commands share."""

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, get_origin

from megalite.cli.results import report_error
from megalite.config.flags import COMMAND_LINE, split_overrides, with_section
from megalite.config.foreign_flags import DEEPSPEED, with_deepspeeds_flags
from megalite.config.sections.describe import section_models, setting, type_names
from megalite.config.sections.unchecked import closest_name
from megalite.errors import ConfigError, MegaliteError

_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)'")
_ARGUMENT = re.compile(r"argument ([^\s:/]+)")
_UNKNOWN = "unrecognized arguments: "

JSON = "--json"
"""The option that every command has, which `megalite.cli.main` takes: it never reaches a parser."""

EVERYTHING = "all"
"""Behind --help: every option of a command that has more than a screen of them."""


def options_and_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (a command's own arguments, its `--section.key value` flags), both in their given order.

    Raises ConfigError with every argument of Megatron-LM among them, each with our settings in its place.
    """
    words = with_deepspeeds_flags(arguments)
    if any(word.startswith("--") and "." not in word.partition("=")[0] for word in words):
        from megalite.convert.adopt.megatron.arguments import megatron_problems

        problems = [problem for problem in megatron_problems(words) if problem.key != DEEPSPEED]
        # One of our settings may only lack its section, which the run's own check says.
        if not all(with_section(problem.key) for problem in problems):
            raise ConfigError(problems, COMMAND_LINE)
    return split_overrides(words)


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors of one line, which suggest the command that was meant.

    The description may be the docstring of the command's module: its "megalite COMMAND: " is left out.
    common: of a command with more options than a screen: those that --help shows; `--help all` shows the others too.
    short: short name -> option, for names that would be read as a setting without its section. run_settings: whether
    the command takes --section.key too, for the suggestion in place of an unknown option.
    """

    def __init__(
        self,
        *,
        prog: str,
        description: str | None = None,
        common: Collection[str] = (),
        short: Mapping[str, str] = MappingProxyType({}),
        run_settings: bool = False,
        **settings: Any,
    ):
        text = (description or "").removeprefix(f"{prog}: ")
        # A short form may mean another option: --kill as --kill-every.
        settings = {"add_help": not common, "allow_abbrev": False, **settings}
        super().__init__(prog=prog, description=text[:1].upper() + text[1:] or None, **settings)
        self._names: Collection[str] = ()
        self.common, self._run_settings = common, run_settings
        self._short, self._typed = short, dict[str, str]()
        about = "print one JSON document"
        self.add_argument(JSON, action="store_true", help=about)
        if common:
            about = f"show common options; {EVERYTHING}: every option"
            self.add_argument("-h", "--help", nargs="?", choices=(EVERYTHING,), action=_Help, help=about)

    def with_long_names(self, words: Sequence[str]) -> list[str]:
        """Return the words with the long name of each option that has a short one; errors say what was typed."""
        named = [word.partition("=") for word in words]
        self._typed = {self._short[name]: name for name, _, _ in named if name in self._short}
        return [self._short.get(name, name) + sign + value for name, sign, value in named]

    def common_help(self) -> str:
        """Return the help with the common options alone."""
        shown = [
            action
            for action in self._actions
            if action.dest in self.common or any(name in self.common for name in action.option_strings)
        ]
        shown.sort(key=lambda action: bool(action.option_strings))
        positional = " ".join(str(action.metavar) for action in shown if not action.option_strings)
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage(f"{self.prog} {positional} [OPTION ...]", [], [])
        formatter.add_text(self.description)
        formatter.start_section("common options")
        formatter.add_arguments(shown)
        formatter.end_section()
        formatter.add_text(f"all options: {self.prog} --help {EVERYTHING}")
        return formatter.format_help()

    def add_subparsers(self, **settings: Any) -> "argparse._SubParsersAction[Any]":
        """Add subcommands, of which one has to be named."""
        added = super().add_subparsers(**{"required": True, "metavar": "COMMAND", **settings})
        self._names = added.choices
        return added

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr and exit with 2."""
        key, cure, value = "", {}, None
        for long, typed in self._typed.items():
            message = message.replace(long, typed)
        wrong = _INVALID_CHOICE.search(message)
        if wrong is not None and self._names:
            key, value, close = "COMMAND", wrong[1], closest(wrong[1], self._names)
            message = f"{self.prog} has no command {wrong[1]}; {meant(wrong[1], self._names)}"
            cure = {key: close} if close else {}
        elif message.endswith(": COMMAND") and self._names:
            message = f"{self.prog} needs a command; use one of {', '.join(self._names)}"
        else:
            key, cure, value = self._cure(message)
            close = self._closest_option(key) if message.startswith(_UNKNOWN) else None
            remedy = f"did you mean {close}? {self.prog} --help" if close else f"{self.prog} --help"
            message = f"{self.prog}: {message}; {remedy} shows the options"
        error = MegaliteError(message, key=key, set=cure, value=value)
        report_error(error.problems, message, 2)
        self.exit(2, f"error: {message}\n")

    def _cure(self, message: str) -> tuple[str, dict[str, Any], Any]:
        """Return the option that argparse complains about, what to set instead of it, and its value."""
        wrong, option = _INVALID_CHOICE.search(message), _ARGUMENT.match(message)
        if wrong is not None and option is not None:
            choices = message.partition("choose from")[2].replace("'", "").strip(" )").split(", ")
            close = closest(wrong[1], choices)
            return option[1], {option[1]: close} if close else {}, wrong[1]
        name, _, value = message.removeprefix(_UNKNOWN).partition(" ")[0].partition("=")
        if message.startswith(_UNKNOWN) and name.startswith("--"):
            options, close = dict(self._options()), self._closest_option(name)
            meant_one = {close: value or True} if close and bool(value) == options.get(close) else {}
            return name, {name: None, **meant_one}, value or None
        return (option[1] if option else ""), {}, None

    def _closest_option(self, name: str) -> str | None:
        """Return the option that is meant by an unknown one: one that begins with it, or is most like it."""
        # Without the dashes, which all have in common.
        options = [option[2:] for option, _ in self._options() if option.startswith("--")]
        word = name.removeprefix("--")
        longer = [option for option in options if len(word) > 1 and option.startswith(word)]
        close = longer[0] if len(set(longer)) == 1 else closest(word, options)
        if close is None and self._run_settings:
            homes = section_models().items()
            known = (f"{home}.{key}" for home, model in homes for key in model.model_fields)
            close = closest_name(word.replace("-", "_"), known)
        return f"--{close}" if close and name.startswith("--") else None

    def _options(self) -> Iterator[tuple[str, bool]]:
        """Yield each option of this command and its subcommands, and whether it takes a value."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._options()
            names = [
                *action.option_strings,
                *(key for key, long in self._short.items() if long in action.option_strings),
            ]
            yield from ((name, action.nargs != 0) for name in names)


class _Help(argparse.Action):
    """Prints the common options, or all of them, and exits with 0."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help() if values == EVERYTHING else parser.common_help(), end="")
        parser.exit()


class _NamedFolders(argparse.Action):
    """Collects arguments of the form NAME=FOLDER as a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        name, _, folder = str(values).partition("=")
        folders = dict(getattr(namespace, self.dest))
        if not name or not folder:
            parser.error(f"{option_string} {values} is not of the form NAME=FOLDER")
        if name in folders:
            parser.error(
                f"{option_string} {values}: another adapter has this name, {folders[name]}; rename one"
            )
        setattr(namespace, self.dest, {**folders, name: Path(folder).expanduser()})


def add_value(
    parser: argparse._ActionsContainer,
    name: str,
    parse: Callable[[str], Any],
    metavar: str,
    about: str,
    default: Any = None,
) -> None:
    """Add an option with a value. Its help ends in the default, if there is one."""
    if default is not None:
        about += f" ({default:g})" if isinstance(default, float) else f" ({default})"
    parser.add_argument(name, type=parse, metavar=metavar, help=about, default=default)


def add_setting(parser: argparse.ArgumentParser, key: str, **changes: Any) -> None:
    """Add the option of a setting `section.name` of run files, with its choices, default and description.

    changes: arguments of `add_argument` in place of these.
    """
    field = setting(key)
    if get_origin(field.annotation) is Literal:
        changes = {"choices": type_names(field.annotation), **changes}
    parser.add_argument(
        flag(key.partition(".")[2]), **{"default": field.default, "help": field.description, **changes}
    )


DTYPES = ("float32", "bfloat16", "float16")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and the options of how it is opened: its type, its layout, its tokenizer and its base."""
    about = (
        "run folder (its latest checkpoint), checkpoint, Hugging Face or PEFT folder, or org/name on the Hub"
    )
    parser.add_argument("model", metavar="MODEL", help=about)
    about = "type to run in (CPU: float32; accelerator: 16 bits)"
    parser.add_argument("--dtype", choices=DTYPES, help=about)
    add_value(parser, "--tensor", whole_number(1), "N", "tensor-parallel size", 1)
    add_value(parser, "--pipeline", whole_number(1), "N", "pipeline-parallel size", 1)
    add_value(parser, "--context", whole_number(1), "N", "ranks that share each long prompt or window", 1)
    about = "ranks among which the experts of a layer are divided: of --context and --tensor"
    add_value(parser, "--expert", whole_number(1), "N", about, 1)
    add_value(parser, "--tokenizer", Path, "FOLDER", "tokenizer folder (default: the model's own)")
    add_value(parser, "--base", Path, "FOLDER", "the weights beside an adapter, where they have moved")


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Add --adapter NAME=FOLDER, which may be repeated: a dict of folders by name."""
    about = "a LoRA adapter beside MODEL that requests may name; may be repeated"
    parser.add_argument("--adapter", action=_NamedFolders, default={}, metavar="NAME=FOLDER", help=about)


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Add --chat-template NAME."""
    about = "chatml, alpaca, plain, one of the tokenizer's, or a Jinja file (default: that of training)"
    parser.add_argument("--chat-template", metavar="NAME", help=about)


def flag(setting: str) -> str:
    """Return how an option is typed: --top-k for top_k."""
    return f"--{setting.replace('_', '-')}"


def meant(word: str, known: Collection[str]) -> str:
    """Return a remedy for an unknown word: the closest of the known ones, or all of them."""
    close = closest(word, known)
    return f"did you mean {close}?" if close else f"use one of {', '.join(known)}"


def closest(word: str, known: Collection[str]) -> str | None:
    """Return the known word that is most like another one; None where none is close."""
    return next(iter(get_close_matches(word, known, n=1)), None)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`, and at most `most`."""
    span = f"{least} or more" if most is None else f"{least} to {most}"

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {span}")
        return int(text)

    return parse


def number_above_zero(most: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type for finite numbers above 0, and at most `most`."""
    span = "above 0" if math.isinf(most) else f"above 0, at most {most:g}"

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (0 < number <= most and math.isfinite(number)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {span}")
        return number

    return parse
