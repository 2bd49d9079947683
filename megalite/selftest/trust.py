"""Self-test results of each operator's implementations on this card: kept on disk, and used to choose one.

On a CPU the repository's tests prove the compiled operators. On an accelerator only plain torch is used until
`megalite selftest` (or the first run) has compared an implementation with float64 and timed it there.
"""

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from megalite.launcher.rank.environment import trust_folder
from megalite.ops import apex, extension
from megalite.ops.choice import TORCH
from megalite.version import package_version

SLOWER = 1.05
"""An implementation counts as slower above this multiple of torch's best time; less is noise."""
UNTESTED = "not tested on this card yet: run megalite selftest"
# Packages with implementations: another version of a package is another implementation.
PACKAGES = (
    "apex",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "liger_kernel",
    "transformer_engine",
    "triton",
)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class CaseResult:
    """The result of one implementation in one case.

    verdict: "absent" if the implementation does not support this case, "failed" if it crashed, hung or raised. error:
    the largest ratio of an error to its tolerance, times `allowed`. seconds: for forward and backward; torch_seconds:
    torch's best. All three are None if not measured.
    """

    verdict: Literal["right", "wrong", "failed", "absent"]
    why: str = ""
    error: float | None = None
    allowed: float | None = None
    seconds: float | None = None
    torch_seconds: float | None = None

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    @property
    def ratio(self) -> float | None:
        """The time over torch's best; None if not measured."""
        return self.seconds / self.torch_seconds if self.seconds and self.torch_seconds else None


# Found: case -> implementation -> finding. Findings: operator -> Found.
Found = Mapping[str, Mapping[str, CaseResult]]
Findings = Mapping[str, Found]


@dataclass(frozen=True)
class OperatorChoice:
    """The implementation chosen for an operator. why: if torch was chosen, why no other was; else empty.

    faults: implementation -> why it is wrong, failed or not tested; slower and absent implementations have none.
    ratio: the time of the chosen implementation over torch's best.
    """

    name: str = TORCH
    why: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)
    ratio: float | None = None


def needs_proof(device_type: str) -> bool:
    """Return whether operators need a self-test on devices of this type before they are used."""
    return device_type != "cpu"


def choose(cases: Sequence[str], implementations: Sequence[str], by_case: Found) -> OperatorChoice:
    """Choose the implementation that is right in all of these cases and the fastest, torch's included."""
    faults, absent, slower, ratios = {}, {}, {}, {}
    for name in implementations:
        findings = {case: by_case.get(case, {}).get(name) for case in cases}
        if fault := _fault(findings):
            faults[name] = fault
            continue
        tested = [finding for finding in findings.values() if finding is not None]
        ratio = time_ratio(tested)
        if missing := [finding.why for finding in tested if finding.verdict == "absent"]:
            absent[name] = missing[0]
        elif ratio > SLOWER:
            slower[name] = f"slower than torch: {ratio:.2f} times its time"
        else:
            ratios[name] = ratio
    if ratios:
        name = min(ratios, key=lambda name: ratios[name])
        return OperatorChoice(name, "", faults, ratios[name])
    # Missing packages are mentioned only if there is no other reason, and then only the first.
    complaints = {name: why for name in implementations if (why := faults.get(name) or slower.get(name))}
    reasons = [*dict.fromkeys((complaints or absent).values())]
    if not complaints or len(reasons) == 1:
        return OperatorChoice(TORCH, reasons[0], faults)
    return OperatorChoice(TORCH, "; ".join(f"{name}: {why}" for name, why in complaints.items()), faults)


def _fault(findings: Mapping[str, CaseResult | None]) -> str:
    """Return why an implementation must not be used in these cases: wrong, failed or untested; empty if it may be."""
    for case, finding in findings.items():
        if finding is None:
            return UNTESTED
        if finding.verdict in ("wrong", "failed"):
            return f"{finding.why} ({case})"
    return ""


def time_ratio(findings: Sequence[CaseResult]) -> float:
    """Return an implementation's time over torch's best, summed over the timed cases; 1 if none was timed."""
    seconds = sum(finding.seconds for finding in findings if finding.seconds is not None)
    best = sum(finding.torch_seconds for finding in findings if finding.torch_seconds is not None)
    return seconds / best if seconds and best else 1.0


def agreed(choices: Sequence[OperatorChoice]) -> OperatorChoice:
    """Return one choice for all machines, given each machine's choice: torch unless all are the same."""
    names = sorted({choice.name for choice in choices})
    faults = {name: fault for choice in choices for name, fault in choice.faults.items()}
    if len(names) == 1:
        return replace(choices[0], faults=faults)
    reasons = [choice.why for choice in choices if choice.name == TORCH]
    return OperatorChoice(TORCH, reasons[0] if reasons else f"machines choose {' and '.join(names)}", faults)


# ---------------------------------------------------------------------------------------------------- what is kept


def machine(device: torch.device) -> dict[str, str]:
    """Return the facts that findings depend on: another card, driver, torch or library needs a new self-test."""
    packages = [f"{name} {release}" for name in PACKAGES if (release := package_version(name))]
    return {
        "device": device.type,
        "card": card_name(device),
        "capability": card_capability(device),
        "driver": driver_version(device),
        "torch": torch.__version__,
        "library": library_digest(),
        # Apex has the same version with and without its compiled modules.
        "packages": ", ".join([*packages, *apex.modules()]),
    }


def card_name(device: torch.device) -> str:
    """Return the card's name; for a CPU its architecture and the instruction set that the library was built for."""
    if device.type == "cpu":
        return f"CPU {platform.machine()} {extension.built().cpu}".strip()
    module: Any = getattr(torch, device.type, None)  # "meta" has none
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def card_capability(device: torch.device) -> str:
    """Return the compute capability of a CUDA card, else an empty string."""
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""


def driver_version(device: torch.device) -> str:
    """Return the kernel driver's version for a CUDA card; if unknown, the CUDA version that the driver supports."""
    if device.type != "cuda":
        return ""
    try:
        if numbers := re.search(r"\b\d+\.\d+(?:\.\d+)?\b", _DRIVER.read_text(encoding="utf-8")):
            return numbers.group()
    except OSError:
        pass
    return f"CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


@cache
def library_digest() -> str:
    """Hash the library's sources and the file itself: the same sources built otherwise are another library."""
    if not extension.LIBRARY.exists():
        return ""
    return (
        f"{extension.built().sources[:16]} {hashlib.sha256(extension.LIBRARY.read_bytes()).hexdigest()[:16]}"
    )


def trust_file(facts: Mapping[str, str]) -> Path:
    """Return the path of this machine's findings."""
    name = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return trust_folder() / f"{name}-{digest}.json"


@dataclass(frozen=True)
class _Kept:
    """The content of a machine's file."""

    machine: Mapping[str, str]
    findings: Findings


_FILE = TypeAdapter(_Kept)


def read(facts: Mapping[str, str]) -> Findings:
    """Return this machine's findings; empty if the file is missing, damaged or from another machine."""
    try:
        kept = _FILE.validate_json(trust_file(facts).read_bytes(), strict=True)
    except (OSError, ValueError):
        return {}
    return kept.findings if kept.machine == dict(facts) else {}


def write(facts: Mapping[str, str], findings: Findings) -> Path:
    """Merge findings into this machine's file, atomically; return its path. Raises OSError if it cannot be written."""
    path, merged = trust_file(facts), joined(read(facts), findings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            # An infinite error (from NaN results) becomes null: JSON cannot represent it.
            file.write(_FILE.dump_json(_Kept(facts, merged), indent=1))
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return path


def joined(before: Findings, later: Findings) -> Findings:
    """Merge findings; where both have one, the later finding counts."""
    merged: dict[str, dict[str, dict[str, CaseResult]]] = {}
    for findings in (before, later):
        for operator, cases in findings.items():
            for case, implementations in cases.items():
                merged.setdefault(operator, {}).setdefault(case, {}).update(implementations)
    return merged
