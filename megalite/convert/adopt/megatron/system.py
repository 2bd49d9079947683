"""Launch scripts of Megatron-LM and Megatron-DeepSpeed: find the command that trains, and answer its arguments."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from megalite.convert.adopt.account import Account, KeyAnswer, Outcome
from megalite.convert.adopt.deepspeed_json import answer_json, read_json
from megalite.convert.adopt.launchers import (
    answer_launcher,
    batch_variables,
    is_hostfile,
    set_data_parallel_size,
)
from megalite.convert.adopt.megatron.arguments import (
    answer_arguments,
    argument_key,
    arguments_of,
    variable_of,
)
from megalite.convert.adopt.megatron.rules import RULES, answer_defaults
from megalite.convert.adopt.rules import Reading
from megalite.convert.adopt.shell.expand import (
    TooLong,
    Variables,
    as_source,
    is_known,
    split_words,
    unknown_parts,
)
from megalite.convert.adopt.shell.script import ScriptText, ShellCommand, read_script
from megalite.convert.adopt.shell.tokens import ShellSyntax, tokens
from megalite.convert.adopt.sources import Source, read_source
from megalite.errors import ConfigError, Problem

_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_SIGNS = (
    "num-layers",
    "num-attention-heads",
    "hidden-size",
    "micro-batch-size",
    "global-batch-size",
    "tensor-model-parallel-size",
    "seq-length",
    "train-iters",
    "train-samples",
    "lr",
    "lr-decay-style",
)
_SUBSTITUTION = re.compile(r"s/(\w+)/([^/\n]*)/g?")
_PRINTED = ("echo", "printf", "sed", "grep", "mkdir")
_OF_DEEPSPEED = (
    "deepspeed",
    "deepspeed-config",
    "zero-stage",
    "no-pipeline-parallel",
    "ds-sequence-parallel-size",
)
_OTHER_MODELS = (
    "bert",
    "t5",
    "ict",
    "realm",
    "vision",
    "vlm",
    "mamba",
    "retro",
    "biencoder",
    "hybrid",
    "mimo",
    "rl",
)


NAME = "Megatron-LM and Megatron-DeepSpeed"


def matches(source: Source) -> bool:
    """Return whether a file is a script with arguments of Megatron-LM."""
    if source.suffix in (".json", ".yml", ".yaml", ".toml"):
        return False
    names = {flag[2:].replace("_", "-") for flag in _FLAG.findall(source.text)}
    return len(names.intersection(_SIGNS)) > 1


def read(sources: Sequence[Source]) -> Account:
    """Return the account of scripts, with their JSON and hostfile. Raises ConfigError for one that cannot be read."""
    scripts = [source for source in sources if source.suffix != ".json" and not is_hostfile(source)]
    name = " ".join(str(source.path) for source in scripts)
    text = "\n".join(source.text for source in scripts)
    script = _script(text, scripts, name)
    launcher, program, words = _training_command(script, name)
    keys, names, strays, repeated = arguments_of(words)
    deepspeed = any(key in keys for key in _OF_DEEPSPEED)
    account = Account("Megatron-DeepSpeed" if deepspeed else "Megatron-LM")
    account.script = script.notes
    answer_launcher(account, launcher, [source for source in sources if is_hostfile(source)], text)
    _answer_program(account, program)
    for written, value in repeated:
        account.add(
            KeyAnswer(written, value, Outcome.NO_EFFECT, {}, "it stands again later, and the last counts")
        )
    reading = answer_arguments(account, keys, names)
    for stray in strays:
        _answer_stray(account, stray)
    if reading.has("deepspeed-config"):
        _answer_json(reading, script, sources, scripts)
    answer_defaults(reading)
    set_data_parallel_size(account)
    return account


def _script(text: str, scripts: Sequence[Source], name: str) -> ScriptText:
    values = batch_variables(text) | {
        key: value for source in scripts for key, value in source.values.items()
    }
    try:
        return read_script(text, values)
    except (ShellSyntax, TooLong) as error:
        problem = Problem(name, f"cannot be read: {error}", "correct the script, or write its command alone")
        raise ConfigError([problem], "megalite adopt") from None


def _training_command(script: ScriptText, name: str) -> tuple[list[str], str, list[str]]:
    """Return (the launcher's words, the program, its arguments) of the command with most arguments of ours."""
    lines = [list(_flattened(command)) for command in script.commands if command.words[0] not in _PRINTED]
    counts = [sum(argument_key(word) in RULES for word in words if word.startswith("--")) for words in lines]
    if not any(counts):
        message = "starts no program with arguments of Megatron-LM, as far as it can be read without a run"
        hints = "; ".join(script.notes[:3])
        raise ConfigError([Problem(name, message, hints or "name the script that trains")], "megalite adopt")
    best = max(range(len(lines)), key=lambda number: (counts[number], number))
    if sum(count > 5 for count in counts) > 1:
        line = script.commands[best].line
        script.notes.append(f"line {line}: several commands train; the one with most arguments is read")
    words = lines[best]
    programs = [number for number, word in enumerate(words) if as_source(word).endswith(".py")]
    first = next(
        (number for number, word in enumerate(words) if word[:2] == "--" and argument_key(word) in RULES), 0
    )
    place = programs[0] if programs else first - 1
    return words[: max(place, 0)], as_source(words[place]) if place >= 0 else "", words[place + 1 :]


def _flattened(command: ShellCommand) -> Iterator[str]:
    """Yield the words of a command, and those inside a text that a shell would read, as in `bash -c "..."`."""
    for word in command.words:
        if any(letter.isspace() for letter in word) and "--" in word:
            try:
                inner = [token.text for token in tokens(word) if token.kind == "word"]
                for text in inner:
                    yield from split_words(text, Variables())
                continue
            except (ShellSyntax, TooLong):
                pass
        yield word


def _answer_program(account: Account, program: str) -> None:
    if not program.endswith(".py"):
        return
    name = PurePosixPath(program).stem
    other = next((kind for kind in _OTHER_MODELS if kind in name.split("_")), None)
    if other is None:
        account.add(KeyAnswer(program, None, Outcome.TAKEN, {}, "megalite train"))
    else:
        reason = f"trains another kind of model ({other}), not a decoder on the next token"
        account.add(KeyAnswer(program, None, Outcome.REFUSED, {}, reason, "adopt a GPT script", numbers=True))


def _answer_stray(account: Account, word: str) -> None:
    if is_known(word):
        account.add(
            KeyAnswer(word, None, Outcome.REFUSED, {}, "belongs to no argument", "remove it", numbers=True)
        )
        return
    missing = unknown_parts(word)[0]
    reason = "further arguments that are known only when the script runs"
    remedy = f"add --set {variable_of(missing)}=WORDS, which may be empty"
    account.add(KeyAnswer(as_source(word), None, Outcome.REFUSED, {}, reason, remedy, numbers=True))


def _answer_json(
    reading: Reading, script: ScriptText, sources: Sequence[Source], scripts: Sequence[Source]
) -> None:
    """Answer the keys of DeepSpeed's JSON: one named beside the script, one that it writes, one in its folder."""
    account, wanted = reading.account, str(reading.get("deepspeed-config"))
    named = [source for source in sources if source.suffix == ".json"]
    written = {as_source(path): content for path, content in script.files.items()}
    beside = [folder / wanted for folder in (*(source.path.parent for source in scripts), Path())]
    if named:
        for source in named:
            content = _substituted(script, source.text)
            answer_json(account, read_json(content, source.path.name), source.path.name)
    elif wanted in written:
        content = as_source(written[wanted])
        answer_json(account, read_json(content, PurePosixPath(wanted).name), PurePosixPath(wanted).name)
    elif place := next((path for path in beside if path.is_file()), None):
        answer_json(account, read_json(_substituted(script, read_source(place).text), place.name), place.name)
    else:
        reason, remedy = "DeepSpeed's JSON is not here", "name it as another PATH"
        account.add(KeyAnswer(wanted, None, Outcome.REFUSED, {}, reason, remedy, numbers=True))


def _substituted(script: ScriptText, content: str) -> str:
    """Return a template of a JSON after the script's `sed "s/NAME/value/"`, once on each line."""
    for command in script.commands:
        for word in command.words[1:] if command.words[0] == "sed" else ():
            form = _SUBSTITUTION.fullmatch(as_source(word))
            if form is not None and is_known(word):
                lines = [line.replace(form[1], form[2], 1) for line in content.split("\n")]
                content = "\n".join(lines)
    return content
