"""megalite selftest: check each operator against float64 here, and time it.

Without RUN.toml the shapes are those of a small Llama. Each operator runs in
its own process with a time limit, so a crash or hang affects only that
operator. Runs and megalite doctor read the stored result.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megalite.cli.arguments import Parser, add_value
from megalite.cli.results import report
from megalite.config.flags import split_overrides
from megalite.errors import ConfigError, Problem
from megalite.launcher.rank.environment import prepare_process
from megalite.monitor.work import working

if TYPE_CHECKING:
    import torch

    from megalite.selftest.registry import Workload
    from megalite.selftest.trust import CaseResult, Findings, OperatorChoice

# Operator, case, implementation, and the finding on it.
_Row: TypeAlias = "tuple[str, str, str, CaseResult]"
_UNKNOWN_VOCABULARY = 32000
_WIDTH = 160


def run(arguments: Sequence[str]) -> int:
    """Run `megalite selftest`; return 0 if all operators are right, 1 if one is wrong, crashed or hung.

    Runs use torch in place of an operator that failed. Raises ConfigError; KernelError if the device does not respond.
    """
    own, overrides = split_overrides(arguments)
    options = command_parser().parse_args(own)
    prepare_process()
    device = _device(options.device)

    from megalite.selftest import trust
    from megalite.selftest.decide import choices_of
    from megalite.selftest.registry import cases_of
    from megalite.selftest.run import prove_all
    from megalite.selftest.table import entries_of

    workload = _workload(options.run_file, overrides, device)
    cases = cases_of(entries_of(options.entries), workload)
    cases = [case for case in cases if not options.operators or case.entry.operator in options.operators]
    with working("testing operators", unit="tests") as work:

        def tell(*_: object) -> None:
            work.advance()

        findings = prove_all(cases, device, entries=options.entries, case_seconds=options.timeout, tell=tell)
    rows = [
        (operator, case, implementation, finding)
        for operator, by_case in findings.items()
        for case, by_implementation in by_case.items()
        for implementation, finding in by_implementation.items()
    ]
    facts = trust.machine(device)
    kept = _keep(facts, findings)
    choices = choices_of(cases, findings)
    report(**_json(facts, rows, choices, kept))
    _show(facts, rows, choices, kept)
    return 1 if any(finding.verdict in ("wrong", "failed") for *_, finding in rows) else 0


def command_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megalite selftest",
        usage="megalite selftest [RUN.toml] [options] [--section.key value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_file", type=Path, nargs="?", metavar="RUN.toml", help="test with the shapes of this run"
    )
    parser.add_argument(
        "--device", default="auto", help='"cuda", "cuda:1" or "cpu"; default: the accelerator if there is one'
    )
    about = "test only these operators: norm, rotary, ..."
    parser.add_argument("--operators", nargs="+", default=[], metavar="NAME", help=about)
    add_value(parser, "--timeout", float, "SECONDS", "time limit of one operator on one shape", 60.0)
    # For tests: a file with other operators.
    parser.add_argument("--entries", type=Path, help=argparse.SUPPRESS)
    return parser


def _device(asked: str) -> "torch.device":
    """Return the device that --device names. Raises ConfigError if this machine does not have it."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if asked == "auto":
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in here:
        remedy = f"use {' or '.join(here)}"
        raise ConfigError(
            [Problem("--device", f"{asked} is not a device of this machine", remedy)], "the command line"
        )
    return device if device.type == "cpu" else torch.device(device.type, device.index or 0)


def _workload(run_file: Path | None, overrides: Sequence[str], device: "torch.device") -> "Workload":
    """Return the run's shapes, or those of a small Llama."""
    from megalite.config.load import load_run
    from megalite.selftest.decide import workload_of
    from megalite.selftest.registry import Workload
    from megalite.train.step.precision import DTYPES, choose_precision

    if run_file is None and not overrides:
        return Workload(DTYPES[choose_precision("auto", device).name])
    config = load_run(run_file, overrides).config
    precision = choose_precision(config.training.precision, device).name
    return workload_of(config, config.model.shape(_UNKNOWN_VOCABULARY), DTYPES[precision])


def _keep(facts: Mapping[str, str], findings: "Findings") -> str:
    """Store the findings; return their path, or why they could not be stored."""
    from megalite.selftest import trust

    try:
        return str(trust.write(facts, findings))
    except OSError as error:
        return f"nowhere: {error}; set MEGALITE_TRUST_FOLDER to a writable folder"


def _json(
    facts: Mapping[str, str], rows: Sequence[_Row], choices: Mapping[str, "OperatorChoice"], kept: str
) -> dict[str, Any]:
    names = ("operator", "case", "implementation")
    listed = [{**dict(zip(names, row, strict=False)), **asdict(row[-1])} for row in rows]
    return {
        "machine": dict(facts),
        "findings": listed,
        "choices": {name: asdict(choice) for name, choice in choices.items()},
        "kept": kept,
    }


def _show(
    facts: Mapping[str, str], rows: Sequence[_Row], choices: Mapping[str, "OperatorChoice"], kept: str
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megalite.ops.choice import TORCH
    from megalite.selftest.trust import needs_proof

    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table("case", "by", "error / allowed", "time / torch's", "verdict", box=None)
    shown = [row for row in rows if row[-1].verdict != "absent"]
    for _, case, implementation, finding in shown:
        error = "" if finding.error is None else f"{finding.error:.1e} / {finding.allowed:.1e}"
        ratio = "" if finding.ratio is None else f"{finding.ratio:.2f}"
        verdict = finding.verdict if finding.right else finding.why
        table.add_row(*map(escape, (case, implementation, error, ratio, verdict)))
    console.print(table)
    here = {implementation for _, _, implementation, _ in shown}
    absent = {
        implementation: finding.why for *_, implementation, finding in rows if implementation not in here
    }
    for why in absent.values():
        print(f"not tested: {why}")
    for name, choice in choices.items():
        print(f"{name}: {choice.name}" + (f" ({choice.why})" if choice.why else ""))
    if any(choice.name != TORCH for choice in choices.values()) and not needs_proof(facts["device"]):
        print("on a CPU only model.kernels decides: the project's tests have checked its compiled operators")
    print(f"kept: {kept}")
