"""The environment variables that travel to the ranks: an explicit list, --export and --env-file, and no secrets."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megalite.errors import LaunchError, Problem, problem_list

# Patterns of the names that are carried to every host, by subject.
TRAVELLING: Mapping[str, tuple[str, ...]] = {
    "megalite": ("MEGALITE_*",),
    "collectives": ("GLOO_*", "NCCL_*", "RCCL_*", "UCX_*", "FI_*", "TORCH_*", "PYTORCH_*"),
    "Python": ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX"),
    "threads": ("OMP_*", "MKL_*", "OPENBLAS_*", "GOMP_*", "KMP_*", "MALLOC_*"),
    "accelerators": ("CUDA_*", "HIP_*", "ROCM_*", "DS_*"),
    "Hugging Face": ("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*"),
    "records": ("WANDB_*", "MLFLOW_*"),
    "locale": ("LANG", "LC_*", "TZ", "XDG_CACHE_HOME"),
}
# Devices are numbered by each host, and ranks by their launcher.
_OF_A_HOST = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "CROSS_RANK", "CROSS_SIZE", "MEGALITE_COORDINATOR"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?(_|$)", re.IGNORECASE)
HIDDEN = "(not shown)"


def travelling(environ: Mapping[str, str], named: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that travel, sorted; named: those of --env-file and --export, which win.

    A variable whose name speaks of a secret travels only if it is named.
    """
    patterns = [pattern for group in TRAVELLING.values() for pattern in group]
    kept = {
        name: value
        for name, value in environ.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        and name not in (*_OF_A_HOST, *_OF_A_RANK)
        and not is_secret(name)
        and not set(value) & {"\n", "\0"}
    }
    return dict(sorted({**kept, **named}.items()))


def is_secret(name: str) -> bool:
    """Return whether a variable's value must never be printed, by its name: HF_TOKEN, WANDB_API_KEY."""
    return _SECRET.search(name) is not None


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Leave out variables that speak of a secret: all users of a machine can see the commands of ssh."""
    return {name: value for name, value in variables.items() if not is_secret(name)}


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the values of secrets hidden."""
    return {name: HIDDEN if is_secret(name) else value for name, value in variables.items()}


def named_variables(
    exports: Sequence[str], env_files: Sequence[Path], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of every --env-file and --export KEY[=VALUE]; the last file wins, and --export over files.

    Raises LaunchError with every problem of a file, or of the options.
    """
    variables = {name: value for path in env_files for name, value in read_env_file(path).items()}
    problems = []
    for export in exports:
        name, equals, value = export.partition("=")
        wrong, remedy = _problem_of_name(name)
        if wrong:
            problems.append(Problem(f"--export {name}", wrong, remedy))
        elif not equals and name not in environ:
            problems.append(Problem(f"--export {name}", "the variable is not set", f"write {name}=VALUE"))
        else:
            variables[name] = value if equals else environ[name]
            if "\n" in variables[name]:
                problems.append(Problem(f"--export {name}", "the value has several lines", "use one line"))
    if problems:
        raise LaunchError(problem_list(problems, "the environment that travels"))
    return variables


def read_env_file(path: Path) -> dict[str, str]:
    """Return the KEY=VALUE lines of a file; blank lines and lines that begin with # are left out.

    A value may stand in single or double quotes, which are removed; nothing in a value is expanded.
    Raises LaunchError with every problem and its line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--env-file {path}: the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LaunchError(f"--env-file {path}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    variables: dict[str, str] = {}
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, _, value = content.partition("=")
        line_problems = list(_problems_of_line(content, lines))
        problems += [Problem(f"line {number}", wrong, remedy) for wrong, remedy in line_problems]
        lines.setdefault(name, number)
        variables[name] = value[1:-1] if value[:1] in ("'", '"') else value
    if problems:
        raise LaunchError(problem_list(problems, f"--env-file {path}"))
    return variables


def _problems_of_line(content: str, lines: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (what is wrong, remedy) of a line; lines: name -> the line that sets it before."""
    name, equals, value = content.partition("=")
    if not equals:
        # Its text could be a secret.
        yield "the line has no =", "write KEY=VALUE, or put # before it"
        return
    if name != name.rstrip() or value != value.lstrip():
        yield f"{name.strip()} has spaces around =", f"write {name.strip()}=VALUE"
        return
    wrong, remedy = _problem_of_name(name)
    if wrong:
        yield f"{name!r} {wrong}", remedy
    elif name in lines:
        yield f"{name} is set twice, first in line {lines[name]}", "keep one of them"
    quote = value[:1]
    if quote in ("'", '"') and (len(value) < 2 or value.find(quote, 1) != len(value) - 1):
        yield f"the value of {name} begins with {quote}, which does not close it", f"end it with {quote}"
    elif quote not in ("'", '"') and " #" in value:
        yield f"the value of {name} has a # behind a space", "quote the value, or move the comment"
    if "\0" in value:
        yield f"the value of {name} has a zero byte", "remove it"


def _problem_of_name(name: str) -> tuple[str, str]:
    """Return what is wrong with the name of a variable that is to travel, and the remedy; ("", "") if nothing is."""
    if name.startswith("export "):
        return "begins with export", "write KEY=VALUE only"
    if not _NAME.fullmatch(name):
        return "is not the name of a variable", "use letters, digits and _"
    if name in _OF_A_HOST:
        return "numbers the GPUs of one host", "choose slots with --include NAME:0,1"
    if name in _OF_A_RANK:
        return "is set for each rank by its launcher", "leave it out"
    return "", ""
