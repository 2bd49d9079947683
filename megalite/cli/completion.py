"""megalite completion: print a script that completes words in bash or zsh.

It knows commands, options, settings and presets. Write it to a file once:
~/.local/share/bash-completion/completions/megalite for bash.
"""

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from shlex import quote

from megalite.cli.arguments import Parser
from megalite.cli.results import report
from megalite.config.sections.describe import section_models, type_names
from megalite.config.sources.presets import PRESETS

# Commands that take settings of run files as flags.
_WITH_SETTINGS = ("train", "launch", "config show", "selftest")
# Values of options that the parser does not list.
_VALUES = {"--model.preset": list(PRESETS)}
# COMPREPLY of a word: of the values of the option before it, else of the words of the command. Files complete as usual.
_BASH = """\
_megalite() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local command="" words="" fitting="" prefix="" name
    # bash splits --option=value into three words, zsh does not.
    [[ $word == = ]] && word=""
    [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $word == --*=* ]] && before=${{word%%=*}} word=${{word#*=}} prefix="${{before}}="
    for name in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
        case "$command $name" in
{paths}
        esac
    done
    case "$command $before" in
{values}
    esac
    if [[ -z $words ]]; then
        case "$command" in
{words}
        esac
    fi
    # A word without a dash is a subcommand or a value, else a file.
    for name in $words; do
        [[ $word == -* || $name != -* ]] && fitting+=" $name"
    done
    COMPREPLY=($(compgen -P "$prefix" -W "$fitting" -- "$word"))
}}
complete -o default -o bashdefault -F _megalite megalite
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit -i && bashcompinit\n"


def run(arguments: Sequence[str]) -> int:
    """Run `megalite completion bash` or `zsh` and return the exit code."""
    options = command_parser().parse_args(arguments)
    script = (_ZSH if options.shell == "zsh" else "") + _script()
    report(script=script)
    print(script, end="")
    return 0


def command_parser() -> Parser:
    """Return the parser of the command."""
    made = Parser(
        prog="megalite completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")
    return made


def _script() -> str:
    from megalite.cli.commands import COMMANDS

    trees: dict[str, argparse.ArgumentParser] = {}
    for name in COMMANDS:
        trees |= _parsers(name, import_module(f"megalite.cli.{name}").command_parser())
    settings, words, values = dict(_settings()), {"": list(COMMANDS)}, list[str]()
    for path, parser in trees.items():
        words[path], valued = _words(parser)
        words[path] += settings if path in _WITH_SETTINGS else ()
        values += [_case(f'"{path} {name}"', choices) for name, choices in valued.items()]
    for name, choices in settings.items():
        values += [_case("|".join(f'"{path} {name}"' for path in _WITH_SETTINGS), choices)] if choices else []
    paths = [path.rpartition(" ") for path in trees]
    return _BASH.format(
        paths="\n".join(
            f'            "{above} {name}") command={quote(f"{above} {name}".strip())} ;;'
            for above, _, name in paths
        ),
        values="\n".join(values),
        words="\n".join(_case(f'"{path}"', offered) for path, offered in words.items()),
    )


def _case(pattern: str, words: Sequence[str]) -> str:
    return f"        {pattern}) words={quote(' '.join(words))} ;;"


def _parsers(path: str, parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the words of each command and subcommand -> its parser."""
    trees = {path: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                trees |= _parsers(f"{path} {name}", inner)
    return trees


def _words(parser: argparse.ArgumentParser) -> tuple[list[str], dict[str, list[str]]]:
    """Return the options and words of a command, and option -> its values."""
    words: list[str] = []
    values: dict[str, list[str]] = {}
    for action in parser._actions:
        choices = list(map(str, action.choices or ()))
        if not action.option_strings:
            words += choices
        elif action.help != argparse.SUPPRESS:
            words += action.option_strings
            values |= dict.fromkeys((name for name in action.option_strings if choices), choices)
    return words, values


def _settings() -> Iterator[tuple[str, list[str]]]:
    """Yield the flag of each setting, and the words that it takes."""
    for section, model in section_models().items():
        for key, info in model.model_fields.items():
            name = f"--{section}.{key}"
            words = [word for each in type_names(info.annotation) for word in each.split(" | ")]
            yield name, _VALUES.get(name, [word for word in words if word.islower()])
