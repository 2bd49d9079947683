"""Results of the self-test for each implementation of an operator on this very card: kept on disk, and their use.

On a CPU the compiled operators are proved by the tests of this repository. On an accelerator nothing is used but plain
torch until `megalite selftest` (or the first run) has compared it with float64 and timed it there.
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

from megalite.launcher.environment import trust_folder
from megalite.ops import apex, extension
from megalite.ops.choice import TORCH

SLOWER = 1.05
"""More than this many times torch's best time is slower; less is noise."""
UNTESTED = "not tested on this card yet: run megalite selftest"
# Implementations by others: a new version of one is another implementation.
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
class Finding:
    """The result of one implementation in one case.

    verdict: "absent" where it cannot compute this case, "failed" where it crashed, hung or raised. error: the largest
    one over what is allowed, times `allowed`. seconds: of a forward and a backward; torch_seconds: torch's best. All
    three are None where they were not measured.
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


# Case -> implementation -> what it showed; and these of each operator.
Found = Mapping[str, Mapping[str, Finding]]
Findings = Mapping[str, Found]


@dataclass(frozen=True)
class Choice:
    """The implementation that an operator has here. why: of torch, why it is no other; else empty.

    faults: implementation -> why it is wrong, failed or not tested; slower and absent implementations have none.
    ratio: the time of the chosen one over torch's best.
    """

    name: str = TORCH
    why: str = ""
    faults: Mapping[str, str] = field(default_factory=dict)
    ratio: float | None = None


def needs_proof(device_type: str) -> bool:
    """Whether operators must prove themselves on devices of this type before they are used."""
    return device_type != "cpu"


def fault(implementation: str, cases: Sequence[str], found: Found) -> str:
    """Return why an implementation is not used in these cases: wrong, failed or untested; empty where it may be."""
    for case in cases:
        finding = found.get(case, {}).get(implementation)
        if finding is None:
            return UNTESTED
        if finding.verdict in ("wrong", "failed"):
            return f"{finding.why} ({case})"
    return ""


def why_not(implementation: str, cases: Sequence[str], found: Found) -> str:
    """Why an implementation is not used in these cases: as of `fault`, or it is absent or slower; else empty."""
    if complaint := fault(implementation, cases, found):
        return complaint
    for case in cases:
        if (finding := found[case][implementation]).verdict == "absent":
            return finding.why
    ratio = time_ratio(implementation, cases, found)
    return f"slower than torch: {ratio:.2f} times its time" if ratio is not None and ratio > SLOWER else ""


def time_ratio(implementation: str, cases: Sequence[str], found: Found) -> float | None:
    """Its time over torch's best in these cases, where they were timed."""
    timed = [found[case][implementation] for case in cases]
    seconds = sum(each.seconds for each in timed if each.seconds is not None)
    best = sum(each.torch_seconds for each in timed if each.torch_seconds is not None)
    return seconds / best if seconds and best else None


def choose(cases: Sequence[str], implementations: Sequence[str], found: Found) -> Choice:
    """The fastest right implementation of an operator in all of these cases, torch's among them."""
    complaints = {each: why_not(each, cases, found) for each in implementations}
    faults = {each: wrong for each in implementations if (wrong := fault(each, cases, found))}
    ratios = {each: time_ratio(each, cases, found) or 1.0 for each, wrong in complaints.items() if not wrong}
    if ratios:
        name = min(ratios, key=lambda each: ratios[each])
        return Choice(name, "", faults, ratios[name])
    # Packages that are not installed are told of only where there is nothing else to tell: then the first alone.
    told = {each: wrong for each, wrong in complaints.items() if not _absent(each, cases, found)}
    reasons = [*dict.fromkeys((told or complaints).values())]
    if not told or len(reasons) == 1:
        return Choice(TORCH, reasons[0], faults)
    return Choice(TORCH, "; ".join(f"{each}: {wrong}" for each, wrong in told.items()), faults)


def _absent(implementation: str, cases: Sequence[str], found: Found) -> bool:
    shown = [found[case][implementation] for case in cases if implementation in found.get(case, {})]
    return any(finding.verdict == "absent" for finding in shown)


def agreed(choices: Sequence[Choice]) -> Choice:
    """The one choice for machines whose own are these: torch, unless all choose alike."""
    names = sorted({each.name for each in choices})
    faults = {name: wrong for each in choices for name, wrong in each.faults.items()}
    if len(names) == 1:
        return replace(choices[0], faults=faults)
    reasons = [each.why for each in choices if each.name == TORCH]
    return Choice(TORCH, reasons[0] if reasons else f"machines choose {' and '.join(names)}", faults)


# ---------------------------------------------------------------------------------------------------- what is kept


def machine(device: torch.device) -> dict[str, str]:
    """All that a finding is valid for: another card, driver, torch or library asks for another test."""
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
    """The card's own name; of a CPU, the processor's architecture and what the library was built for."""
    if device.type == "cpu":
        return f"CPU {platform.machine()} {extension.built().cpu}".strip()
    module: Any = getattr(torch, device.type, None)  # "meta" has none
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def card_capability(device: torch.device) -> str:
    """Return the compute capability of a CUDA card, else an empty string."""
    return ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""


def driver_version(device: torch.device) -> str:
    """Return the version of a CUDA card's kernel driver, or of the CUDA it supports where the driver's is unknown."""
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
    """Where findings of this machine are kept."""
    name = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return trust_folder() / f"{name}-{digest}.json"


def read(facts: Mapping[str, str]) -> Findings:
    """All that was found on this machine; nothing where the file is absent, damaged or of another machine."""
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


def _finding(written: Mapping[str, Any]) -> Finding:
    """Raises TypeError or ValueError where this is none."""
    finding = Finding(**written)
    numbers = (finding.error, finding.allowed, finding.seconds, finding.torch_seconds)
    if finding.verdict not in ("right", "wrong", "failed", "absent") or not isinstance(finding.why, str):
        raise ValueError(f"no finding: {written}")
    if any(each is not None and not isinstance(each, int | float) for each in numbers):
        raise ValueError(f"no numbers: {written}")
    return finding


def write(facts: Mapping[str, str], findings: Findings) -> Path:
    """Keep these beside what is kept already; whole or not at all. Raises OSError where nothing can be written."""
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


def _written(finding: Finding) -> Finding:
    """JSON has no infinity, which an error is where something is not a number."""
    return finding if finding.error is None or math.isfinite(finding.error) else replace(finding, error=None)


def joined(before: Findings, later: Findings) -> Findings:
    """Both; what was found later counts."""
    return {
        operator: {
            case: {**before.get(operator, {}).get(case, {}), **later.get(operator, {}).get(case, {})}
            for case in {**before.get(operator, {}), **later.get(operator, {})}
        }
        for operator in {**before, **later}
    }
