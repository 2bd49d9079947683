"""megalite doctor: show what is installed, what is missing and why that matters, and what a run would use."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.cli.arguments import Parser, add_value
from megalite.cli.results import report
from megalite.launcher.hosts.exported_variables import travelling, without_secrets
from megalite.launcher.hosts.host_report import HostRequirements
from megalite.launcher.hosts.job_hosts import HostOptions, find_hosts, place_ranks
from megalite.launcher.hosts.preflight import SECONDS, preflight, transport_to
from megalite.launcher.machine_report import MachineFinding, apex, packages, programs, system
from megalite.launcher.rank.detect import rank_info
from megalite.launcher.rank.environment import variables
from megalite.version import __version__

if TYPE_CHECKING:
    from megalite.selftest.trust import CaseResult

_WIDTH = 14
_CASE_WIDTH = 60


def run(arguments: Sequence[str]) -> int:
    """Run `megalite doctor`; return 0 if a training job can run here, 1 if something it needs is missing.

    With RUN.toml or --hostfile it checks all hosts of a launch instead; 2 if one of them cannot run its ranks.
    """
    options = command_parser().parse_args(arguments)
    if options.run_file or options.hostfile or options.include or options.exclude:
        return _check_hosts(options)
    findings = {"packages": packages(), "programs": programs(), "optional": [apex()]}
    facts = {"megalite": __version__, **system(), "launcher": _launcher()}
    has_torch = _found(findings["packages"], "torch")
    kernels, used, proved = (_kernels(), _used(), _proved()) if has_torch else ({}, {}, {})
    content = {name: [asdict(each) for each in members] for name, members in findings.items()}
    report(facts=facts, **content, kernels=kernels, used=used, tested=proved)
    lines = [*_lines(facts, findings), *(_section("compiled operators:", kernels) if kernels else ())]
    lines += _section("used here:" if used else "nothing can run here without torch", used)
    for device, cases in proved.items():
        lines += _section(f"tested on {device} (megalite selftest):", cases, _CASE_WIDTH)
    print(*lines, sep="\n")
    needed = ("torch", "tokenizers", "safetensors")
    return 0 if all(_found(findings["packages"], name) for name in needed) else 1


def command_parser() -> Parser:
    parser = Parser(prog="megalite doctor", description=__doc__)
    hosts = parser.add_argument_group("the hosts of a job, before it is launched")
    hosts.add_argument(
        "run_file",
        type=Path,
        nargs="?",
        metavar="RUN.toml",
        help="run whose file and folder every host must have; hosts: the hostfile's, or the SLURM allocation's",
    )
    add_value(hosts, "--hostfile", Path, "FILE", "lines of NAME slots=N")
    for flag, about in (("--include", "only these"), ("--exclude", "not these")):
        about = f"NAME[:SLOT,SLOT][@NAME...]: {about}"
        hosts.add_argument(flag, default="", metavar="HOSTS", help=about)
    about = "how long each host may take for an answer"
    add_value(hosts, "--preflight-seconds", float, "N", about, SECONDS)
    return parser


def _check_hosts(options: argparse.Namespace) -> int:
    """Print the preflight of all hosts; return 0 if all passed, 2 otherwise."""
    chosen = HostOptions(hostfile=options.hostfile, include=options.include, exclude=options.exclude)
    available, run_folder, interface = find_hosts(chosen, variables()), None, "auto"
    slots = {host.name: len(host.slots) for host in available.hosts}
    if options.run_file:
        # Imported here: the report on this machine needs no settings.
        from megalite.config.load import load_run

        config = load_run(options.run_file).config
        run_folder, interface = Path(config.run.folder), config.launch.interface
        if not available.counted:
            placed, _ = place_ranks(available, config.layout.world_size)
            slots = {host.name: len(host.slots) for host in placed}
    environment = without_secrets(travelling(variables(), {}))
    required = HostRequirements(
        Path.cwd(), sys.executable, options.run_file, run_folder, environment, launch_interface=interface
    )
    print(f"asking {len(slots)} host{'s' * (len(slots) != 1)} of {available.named}")
    result = preflight(slots, required, transport_to(available), options.preflight_seconds)
    for line in result.lines():
        print(line)
    failed = len(slots) - len(result.passed)
    report(hosts=list(slots), passed=result.passed, findings=[asdict(each) for each in result.findings])
    print(f"{failed} of {len(slots)} hosts cannot run the job" if failed else "all hosts can run the job")
    return 2 if failed else 0


def _lines(facts: Mapping[str, str], findings: Mapping[str, list[MachineFinding]]) -> Iterator[str]:
    for name, fact in facts.items():
        yield f"{name:<{_WIDTH}} {fact}"
    for title, members in findings.items():
        yield from ("", f"{title}:")
        for finding in members:
            mark = "+" if finding.found else "-"
            present = f"{finding.found}  ({finding.purpose})"
            rest = present if finding.found else f"not found: {finding.without}"
            yield f" {mark} {finding.name:<{_WIDTH - 2}} {rest}"


def _section(title: str, facts: Mapping[str, str], width: int = _WIDTH - 2) -> list[str]:
    return ["", title, *(f"   {name:<{width}} {fact}" for name, fact in facts.items())]


def _launcher() -> str:
    info = rank_info()
    if info is None:
        return "none: megalite train starts its own ranks on this machine"
    return f"{info.launcher}, rank {info.rank} of {info.world_size} on {info.node}"


def _kernels() -> dict[str, str]:
    """Describe the library of compiled operators: how it was built, and whether it can be used on each device type."""
    from megalite.ops import extension

    built = extension.built()
    facts = {"built": built.said}
    if built.library:
        facts["for"] = ", ".join(
            [built.cpu or built.machine, *(f"sm_{arch.replace('.', '')}" for arch in built.archs)]
        )
        facts["from"] = f"sources {built.sources[:12]}, with torch {built.torch}, {built.cxx}" + (
            f", nvcc {built.nvcc}" if built.nvcc else ""
        )
        facts["torch"] = extension.TORCH_VERSIONS
    facts |= {f"left out: {name}": why for name, why in built.left_out.items()}
    for device in ("cpu", "cuda"):
        facts[f"on {device}"] = extension.why_not(device) or "usable"
    return facts


def _proved() -> dict[str, dict[str, str]]:
    """Return device -> "operator: case, implementation" -> verdict of the self-test, untested operators included."""
    import torch

    from megalite.ops.choice import SLOTS
    from megalite.selftest import trust

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.device("cpu")]
    if accelerator is not None:
        devices += [torch.device(accelerator.type, each) for each in range(torch.accelerator.device_count())]
    proved: dict[str, dict[str, str]] = {}
    for device in devices:
        facts = trust.machine(device)
        findings = trust.read(facts)
        if not findings and not trust.needs_proof(device.type):
            continue  # CPU operators are used without a self-test
        shown = {
            f"{operator}: {case}, {name}": _verdict(finding)
            for operator, cases in findings.items()
            for case, implementations in cases.items()
            for name, finding in implementations.items()
        }
        missing = {
            operator: "not tested yet: torch computes it" for operator in SLOTS if operator not in findings
        }
        proved[facts["card"]] = shown | missing
    return proved


def _verdict(finding: "CaseResult") -> str:
    from megalite.selftest.trust import SLOWER

    if finding.verdict == "absent":
        return f"absent: {finding.why}"
    if not finding.right:
        return f"refused: {finding.why}"
    if (ratio := finding.ratio) is None:
        return "right"
    return f"right, {ratio:.2f} of torch's time" + (": slower, torch computes it" if ratio > SLOWER else "")


def _used() -> dict[str, str]:
    """Describe what a run would use: devices, collectives, precision, attention, compiled operators."""
    import torch

    from megalite.parallel.device import local_device
    from megalite.parallel.mesh import backend_of
    from megalite.selftest import trust
    from megalite.selftest.decide import used_operators
    from megalite.train.step.precision import choose_precision

    device = local_device(0, 1)
    used = {
        "torch": f"{torch.__version__}, "
        + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build")
    }
    if device.type == "cpu":
        used["device"] = "CPU: torch finds no GPU"
    else:
        for index in range(torch.accelerator.device_count()):
            card = torch.device(device.type, index)
            memory_bytes = torch.get_device_module(card).get_device_properties(card).total_memory
            facts = [trust.card_name(card), f"{memory_bytes / 2**30:.0f} GiB"]
            if capability := trust.card_capability(card):
                facts.append(f"compute capability {capability}")
            used[f"GPU {index}"] = ", ".join(facts)
    used["collectives"] = backend_of(device) or f"none: this torch has none for {device.type}; use one rank"
    used["precision"] = f"{choose_precision('auto', device).name} by default on this device"
    return used | used_operators(device.type)


def _found(findings: Sequence[MachineFinding], name: str) -> Any:
    return next(each.found for each in findings if each.name == name)
