"""The worker process of the self-test: reads cases, runs untested implementations, writes one line for each case.

The worker may crash, hang or destroy the device's context; selftest/run.py then starts another.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import IO, Any

import torch

from megalite.launcher.process import die_with_parent
from megalite.selftest.check import poisoned
from megalite.selftest.prove import prove
from megalite.selftest.registry import Case
from megalite.selftest.table import entries_of
from megalite.selftest.trust import CaseResult

READY = "ready"


def main(arguments: list[str]) -> int:
    """Answer each input line {entry, dtype, shapes, own, implementation} with one line of `answers`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--entries", type=Path, help="a file with ENTRIES instead of this package's")
    parser.add_argument("--answers", type=int, required=True, help="a file descriptor")
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    entries = {entry.name: entry for entry in entries_of(options.entries)}
    device = torch.device(options.device)  # the file of entries may register this device type
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    with os.fdopen(options.answers, "w", encoding="utf-8") as answers:
        _warm_up(device)
        _say(answers, READY)
        for line in sys.stdin:
            asked = json.loads(line)
            shapes = tuple(map(tuple, asked["shapes"]))
            case = Case(entries[asked["entry"]], getattr(torch, asked["dtype"]), shapes, asked["own"])
            _say(answers, asdict(_answer(case, asked["implementation"], device)))
    return 0


def _warm_up(device: torch.device) -> None:
    """Make torch finish its lazy imports and start-up, so that no implementation's time includes them."""
    with poisoned():
        numbers = torch.ones(2, 2, dtype=torch.float64, device=device, requires_grad=True)
        (numbers @ numbers).sum().backward()


def _say(answers: IO[str], what: Any) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _answer(case: Case, implementation: str, device: torch.device) -> CaseResult:
    try:
        finding = prove(case, implementation, device)
    except Exception as error:  # any error rules this implementation out
        message = str(error).strip().splitlines()
        return CaseResult("failed", f"failed: {type(error).__name__}: {message[0] if message else ''}"[:200])
    if finding.error is not None and not isfinite(finding.error):
        return replace(finding, error=None, allowed=None)
    return finding
