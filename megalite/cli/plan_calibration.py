"""The measured machine of `megalite plan --calibrate` and `--calibration FILE`."""

import argparse
import json
import sys
from pathlib import Path
from socket import gethostname

from megalite.config.sections.schema import RunConfig
from megalite.errors import ConfigError, Problem
from megalite.launcher.rank.environment import prepare_process
from megalite.planner.calibrated_step import CalibratedMachine
from megalite.planner.calibration import DEFAULT_FILE, Calibration, read_calibration, write_calibration
from megalite.version import package_version

# Option -> its default; they say what a measured machine has measured.
_ASSUMED = {
    "card": None,
    "nodes": None,
    "hostfile": None,
    "network": 50.0,
    "efficiency": 0.55,
    "link_efficiency": 0.75,
}


def calibrated_machine(
    options: argparse.Namespace, config: RunConfig, rows: int
) -> tuple[RunConfig, CalibratedMachine]:
    """Return the run with a known precision, and the machine that was measured, now or before.

    Raises ConfigError for options that a measured machine leaves no room for, and for a file without these times.
    """
    by = "--calibrate" if options.calibrate else "--calibration"
    for name, default in _ASSUMED.items():
        if getattr(options, name) != default:
            message = f"has no effect with {by}, which plans for one machine with its own measured times"
            raise ConfigError(
                [Problem(f"--{name.replace('_', '-')}", message, f"leave it out, or leave {by} out")]
            )
    if options.calibrate:
        config, calibration = _measure(options, config, rows)
    else:
        calibration = read_calibration(options.calibration)
        for line in _differences(calibration):
            print(line, file=sys.stderr)
        if config.training.precision == "auto":
            config = config.in_precision(calibration.precisions[0])
    machine = CalibratedMachine(calibration, options.cards_per_node or calibration.units)
    machine.computing(1, config.training.precision)  # raises without its precision
    return config, machine


def _measure(options: argparse.Namespace, config: RunConfig, rows: int) -> tuple[RunConfig, Calibration]:
    """Measure this machine and write the file."""
    file = options.calibration or Path(DEFAULT_FILE)
    _require_replaceable(file)
    prepare_process()

    from megalite.parallel.device import local_device
    from megalite.train.step.calibrate import calibrate
    from megalite.train.step.precision import choose_precision

    config = config.in_precision(choose_precision(config.training.precision, local_device(0, 1)).name)
    print(
        f"measuring this machine in {config.training.precision}; leave it alone for one to two minutes",
        flush=True,
    )
    calibration = calibrate([config], rows, gethostname())
    write_calibration(calibration, file)
    print(f"written to {file}")
    return config, calibration


def _require_replaceable(file: Path) -> None:
    """Raise ConfigError if the file cannot be written, or is there and no calibration."""
    if not file.parent.is_dir():
        raise ConfigError(
            [Problem("--calibration", f"{file.parent} is no folder", "make it, or name another file")]
        )
    if not file.exists():
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not (isinstance(content, dict) and "computing" in content):
        message = f"{file} exists and is no calibration"
        raise ConfigError([Problem("--calibration", message, "name another file")])


def _differences(calibration: Calibration) -> list[str]:
    """Return notes on what differs between the measured machine and this one."""
    notes = []
    if calibration.machine != gethostname():
        notes.append(
            f"note: measured on {calibration.machine}; the plan is for that machine, not for this one"
        )
    installed = package_version("torch")
    if installed and calibration.torch.split("+")[0] != installed.split("+")[0]:
        notes.append(
            f"note: measured with torch {calibration.torch}; here is torch {installed}: calibrate again"
        )
    return notes
