"""megalite examples: copy the examples and launch scripts into a folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import megalite
from megalite.cli.arguments import Parser
from megalite.cli.results import report
from megalite.errors import ConfigError, Problem, disk_error, named

FOLDERS = ("examples", "launch")
_OF_THE_CHECKOUT = ("setup.sh", "container.sh", "Dockerfile*", "megalite.def")
_DEFAULT = Path("megalite-examples")
_PACKAGE = Path(megalite.__file__).parent


def run(arguments: Sequence[str]) -> int:
    """Run `megalite examples [FOLDER]` and return the exit code. Raises ConfigError where FOLDER has such files."""
    folder = command_parser().parse_args(arguments).folder
    source = shared_folder()
    if standing := [name for name in FOLDERS if (folder / name).exists()]:
        problem = Problem(
            "FOLDER",
            f"{folder / standing[0]} exists",
            f"megalite examples {folder}-2 copies to another",
            {"FOLDER": f"{folder}-2"},
            value=str(folder),
        )
        raise ConfigError([problem], "megalite examples")
    for name in FOLDERS:
        left_out = shutil.ignore_patterns("__pycache__", *_OF_THE_CHECKOUT)
        shutil.copytree(source / name, folder / name, ignore=left_out, copy_function=_copy)
    report(folder=folder, folders=FOLDERS)
    print(f"{folder}: {', '.join(f'{name}/' for name in FOLDERS)}")
    print(f"next: cd {folder} && megalite train examples/quickstart/run.toml")
    return 0


def _copy(source: str, copy: str) -> None:
    try:
        with named(Path(copy)):
            shutil.copy2(source, copy)
    except OSError as error:  # copytree would collect the texts of such errors, and go on with the next file
        raise disk_error(error) or error from error


def command_parser() -> Parser:
    parser = Parser(prog="megalite examples", description=__doc__)
    about = "the folder to create (default: %(default)s)"
    parser.add_argument("folder", nargs="?", type=Path, default=_DEFAULT, metavar="FOLDER", help=about)
    return parser


def shared_folder() -> Path:
    """Return the folder with FOLDERS: in an installed wheel the package's _share, else the checkout."""
    share = _PACKAGE / "_share"
    folder = share if share.exists() else _PACKAGE.parent
    if missing := [name for name in FOLDERS if not (folder / name).is_dir()]:
        problem = Problem(
            "megalite", f"{folder} has no {missing[0]}/", "pip install --force-reinstall megalite"
        )
        raise ConfigError([problem], "the installation")
    return folder
