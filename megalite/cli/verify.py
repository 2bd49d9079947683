"""megalite verify: train a run file's layout and one process side by side, and compare every tensor.

Exit code 0 where all agree, 1 where a tensor departs. The run is made small before, unless --full-size is given.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.cli.arguments import Parser, add_value, options_and_settings, whole_number
from megalite.cli.results import report
from megalite.cli.verify_checkpoints import add_checkpoint_flags, run_checkpoints
from megalite.config.flags import COMMAND_LINE
from megalite.config.load import load_run
from megalite.errors import ConfigError, Problem
from megalite.launcher.rank.detect import rank_info
from megalite.verify.certificate import Certificate, require_place
from megalite.verify.from_folder import verify_folder
from megalite.verify.layouts import axes_without_effect
from megalite.verify.matrix import MatrixCertificate, verify_matrix
from megalite.verify.run import VerifyRequest, ended_by_term, verify

_SHORT = {"--steps": "--compared-steps", "--precision": "--compared-precision"}
_MODES = {"checkpoint": "--checkpoint", "folder": "--from"}
# Mode -> the options that only this mode has; "": a run file.
_OPTIONS = {
    "checkpoint": ("--tolerance", "--hf-config", "--vocab-size"),
    "folder": ("--text", "--layers"),
    "": (*_SHORT, "--full-size"),
}
_COMMON = "run_file --matrix --from --checkpoint --compared-steps --compared-precision --full-size --help"


def run(arguments: Sequence[str]) -> int:
    """Run `megalite verify` in the one mode that its arguments name; return 1 where something departs."""
    parser = command_parser()
    own, flags = options_and_settings(parser.with_long_names(arguments))
    options = parser.parse_args(own)
    _refuse_options_of_other_modes(options)
    if options.checkpoint is not None:
        # No run is read, so that no word is a setting.
        options = command_parser().parse_args(arguments)
        if options.run_file or options.output:
            beside = str(options.run_file or "--output")
            rule, remedy = "has no effect with --checkpoint", "leave it out; --json prints the whole outcome"
            raise ConfigError([Problem(beside, rule, remedy, {beside: None})], COMMAND_LINE)
        return run_checkpoints(options)
    _refuse_launcher()
    with ended_by_term():
        return _verified(options, flags)


def _verified(options: Namespace, flags: Sequence[str]) -> int:
    if options.folder is not None:
        output = options.output or Path(f"{Path(options.folder).resolve().name}.verify.json")
        require_place(output)
        own = {"text": options.text, "layers": options.layers}
        return _tell(verify_folder(options.folder, options.run_file, flags, **own, say=_say), output)
    if options.run_file is None:
        problem = Problem("RUN.toml", "is missing", "name the run file to verify")
        raise ConfigError([problem], COMMAND_LINE)
    # Text and folders of the run are not read, so they need not be here.
    config = load_run(options.run_file, flags).config
    asked = {"steps": options.compared_steps, "precision": options.compared_precision}
    values: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    request = VerifyRequest(**values, full_size=options.full_size)
    output = options.output or options.run_file.with_suffix(".verify.json")
    require_place(output)
    if options.matrix is not None:
        _refuse_axes(axes_without_effect(options.run_file, flags, options.matrix))
        matrix = verify_matrix(options.run_file, flags, options.matrix, request, say=_say)
        return _tell_matrix(matrix, output)
    return _tell(verify(config, request, say=_say), output)


def command_parser() -> Parser:
    parser = Parser(prog="megalite verify", description=__doc__, common=_COMMON.split(), short=_SHORT)
    about = "the run to verify; --SECTION.KEY VALUE overrides it"
    parser.add_argument("run_file", type=Path, nargs="?", metavar="RUN.toml", help=about)
    modes = parser.add_mutually_exclusive_group()
    about = "every legal layout of up to N ranks in place of the run's own"
    add_value(modes, "--matrix", whole_number(1), "N", about)
    about = "compare a Hugging Face folder, or org/name, with transformers: logits, loss, gradients, in any layout"
    modes.add_argument("--from", dest="folder", metavar="FOLDER", help=about)
    add_value(parser, "--text", Path, "FILE", "with --from: text to compare on (default: random tokens)")
    about = "with --from: compare the first N layers alone (default: all)"
    add_value(parser, "--layers", whole_number(1), "N", about)
    add_checkpoint_flags(parser, modes)
    about, steps = "training steps to compare (2); --steps for short", whole_number(1)
    add_value(parser, "--compared-steps", steps, "N", about)
    about = "float64, where only wrong code departs (default), or the run's own; --precision for short"
    parser.add_argument("--compared-precision", choices=("float64", "run"), help=about)
    parser.add_argument("--full-size", action="store_true", help="keep the run's own sizes and weights")
    about = "the certificate, with a .txt for people beside it (default: RUN.verify.json)"
    add_value(parser, "--output", Path, "FILE", about)
    return parser


def _refuse_options_of_other_modes(options: Namespace) -> None:
    """ConfigError where an option would have no effect in the mode that the arguments name."""
    used = "checkpoint" if options.checkpoint is not None else "folder" if options.folder is not None else ""
    problems = [
        Problem(flag, f"has no effect {'without' if mode else 'with'} {_MODES[mode or used]}", "leave it out")
        for mode, flags in _OPTIONS.items()
        for flag in flags
        if mode != used and getattr(options, _destination(flag)) not in (None, False)
    ]
    if problems:
        raise ConfigError(problems, COMMAND_LINE)


def _refuse_axes(axes: Sequence[str]) -> None:
    """Raise ConfigError for sizes of one layout beside --matrix that change none of its layouts."""
    rule = "has no effect with --matrix, which takes every layout"
    if problems := [Problem(f"--{axis}", rule, "leave it out", {axis: None}) for axis in axes]:
        raise ConfigError(problems, COMMAND_LINE)


def _destination(flag: str) -> str:
    return _SHORT.get(flag, flag)[2:].replace("-", "_")


def _tell(certificate: Certificate, output: Path) -> int:
    for line in certificate.lines():
        print(line)
    text = certificate.write(output)
    print(f"certificate  {output}, {text}  ({certificate.seconds:.0f} s)")
    report(certificate=output, text=text, **certificate.as_dict())
    return 0 if certificate.holds else 1


def _tell_matrix(matrix: MatrixCertificate, output: Path) -> int:
    for line in matrix.summary():
        print(line)
    text = matrix.write(output)
    print(f"certificate  {output}, {text}  ({matrix.seconds:.0f} s)")
    report(certificate=output, text=text, **matrix.as_dict())
    if matrix.left:
        raise KeyboardInterrupt
    return 0 if matrix.holds else 1


def _refuse_launcher() -> None:
    """ConfigError under a launcher: this command starts its own ranks."""
    if (info := rank_info()) is not None:
        problem = Problem(
            "megalite verify", f"starts its own ranks, and not under {info.launcher}", "run it alone"
        )
        raise ConfigError([problem], COMMAND_LINE)


def _say(line: str) -> None:
    print(line, flush=True)
