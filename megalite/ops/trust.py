"""Self-test results of each operator's implementations on this card: kept on disk, and used to choose one.

On a CPU the repository's tests prove the compiled operators. On an accelerator only plain torch is used until
`megalite selftest` (or the first run) has compared an implementation with float64 and timed it there.
"""

import hashlib
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from megalite.launcher.rank.environment import trust_folder
from megalite.ops import apex, extension
from megalite.ops.choice import TORCH

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


def fault(implementation: str, cases: Sequence[str], found: Found) -> str:
    """Return why an implementation must not be used in these cases: wrong, failed or untested; empty if it may be."""
    for case in cases:
        finding = found.get(case, {}).get(implementation)
        if finding is None:
            return UNTESTED
        if finding.verdict in ("wrong", "failed"):
            return f"{finding.why} ({case})"
    return ""


def why_not(implementation: str, cases: Sequence[str], found: Found) -> str:
    """Return why an implementation is not used in these cases: its `fault`, absent, or slower; empty if it is used."""
    if complaint := fault(implementation, cases, found):
        return complaint
    for case in cases:
        if (finding := found[case][implementation]).verdict == "absent":
            return finding.why
    ratio = time_ratio(implementation, cases, found)
    return f"slower than torch: {ratio:.2f} times its time" if ratio is not None and ratio > SLOWER else ""


def time_ratio(implementation: str, cases: Sequence[str], found: Found) -> float | None:
    """Return an implementation's time over torch's best, summed over the timed cases; None if none was timed."""
    timed = [found[case][implementation] for case in cases]
    seconds = sum(each.seconds for each in timed if each.seconds is not None)
    best = sum(each.torch_seconds for each in timed if each.torch_seconds is not None)
    return seconds / best if seconds and best else None


def choose(cases: Sequence[str], implementations: Sequence[str], found: Found) -> OperatorChoice:
    """Choose the implementation that is right in all of these cases and the fastest, torch's included."""
    complaints = {each: why_not(each, cases, found) for each in implementations}
    faults = {each: wrong for each in implementations if (wrong := fault(each, cases, found))}
    ratios = {each: time_ratio(each, cases, found) or 1.0 for each, wrong in complaints.items() if not wrong}
    if ratios:
        name = min(ratios, key=lambda each: ratios[each])
        return OperatorChoice(name, "", faults, ratios[name])
    # Missing packages are mentioned only if there is no other reason, and then only the first.
    told = {each: wrong for each, wrong in complaints.items() if not _absent(each, cases, found)}
    reasons = [*dict.fromkeys((told or complaints).values())]
    if not told or len(reasons) == 1:
        return OperatorChoice(TORCH, reasons[0], faults)
    return OperatorChoice(TORCH, "; ".join(f"{each}: {wrong}" for each, wrong in told.items()), faults)


def _absent(implementation: str, cases: Sequence[str], found: Found) -> bool:
    shown = [found[case][implementation] for case in cases if implementation in found.get(case, {})]
    return any(finding.verdict == "absent" for finding in shown)


def agreed(choices: Sequence[OperatorChoice]) -> OperatorChoice:
    """Return one choice for all machines, given each machine's choice: torch unless all are the same."""
    names = sorted({each.name for each in choices})
    faults = {name: wrong for each in choices for name, wrong in each.faults.items()}
    if len(names) == 1:
        return replace(choices[0], faults=faults)
    reasons = [each.why for each in choices if each.name == TORCH]
    return OperatorChoice(TORCH, reasons[0] if reasons else f"machines choose {' and '.join(names)}", faults)


# ---------------------------------------------------------------------------------------------------- what is kept


def machine(device: torch.device) -> dict[str, str]:
    """Return the facts that findings depend on: another card, driver, torch or library needs a new self-test."""
    packages = [f"{name} {found}" for name in PACKAGES if (found := _installed(name))]
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


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def trust_file(facts: Mapping[str, str]) -> Path:
    """Return the path of this machine's findings."""
    name = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return trust_folder() / f"{name}-{digest}.json"


def read(facts: Mapping[str, str]) -> Findings:
    """Return this machine's findings; empty if the file is missing, damaged or from another machine."""
    try:
        written = json.loads(trust_file(facts).read_text(encoding="utf-8"))
        if written["machine"] != dict(facts):
            return {}
        return {
            operator: {
                case: {name: _finding(each) for name, each in shown.items()} for case, shown in cases.items()
            }
            for operator, cases in written["findings"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _finding(written: Mapping[str, Any]) -> CaseResult:
    """Parse a finding. Raises TypeError or ValueError if `written` is not one."""
    finding = CaseResult(**written)
    numbers = (finding.error, finding.allowed, finding.seconds, finding.torch_seconds)
    if finding.verdict not in ("right", "wrong", "failed", "absent") or not isinstance(finding.why, str):
        raise ValueError(f"no finding: {written}")
    if any(each is not None and not isinstance(each, int | float) for each in numbers):
        raise ValueError(f"no numbers: {written}")
    return finding


def write(facts: Mapping[str, str], findings: Findings) -> Path:
    """Merge findings into this machine's file, atomically; return its path. Raises OSError if it cannot be written."""
    path, merged = trust_file(facts), joined(read(facts), findings)
    content = {
        operator: {
            case: {name: asdict(_written(each)) for name, each in shown.items()}
            for case, shown in cases.items()
        }
        for operator, cases in merged.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            json.dump({"machine": dict(facts), "findings": content}, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return path


def _written(finding: CaseResult) -> CaseResult:
    """Return the finding without an infinite error (from NaN results), which JSON cannot represent."""
    return finding if finding.error is None or math.isfinite(finding.error) else replace(finding, error=None)


def joined(before: Findings, later: Findings) -> Findings:
    """Merge findings; where both have one, the later finding counts."""
    return {
        operator: {
            case: {**before.get(operator, {}).get(case, {}), **later.get(operator, {}).get(case, {})}
            for case in {**before.get(operator, {}), **later.get(operator, {})}
        }
        for operator in {**before, **later}
    }
