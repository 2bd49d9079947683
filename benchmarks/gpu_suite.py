"""Everything a GPU has to show, in one command of less than ten minutes.

    python -m benchmarks.gpu_suite                    # on a machine with a GPU
    python -m benchmarks.gpu_suite --seconds 300      # in less time: the first parts
    python -m benchmarks.gpu_suite --sanitize         # compute-sanitizer over tiny shapes, nothing else
    python -m benchmarks.gpu_suite --device cpu       # the parts that need no GPU, in small
    python -m benchmarks.gpu_suite --read A.json B.json  # bring reports of other machines into the repository
    python -m benchmarks.gpu_suite --skeleton         # benchmarks/results/gpu.md with nothing measured

Builds the compiled operators where none fit, which takes minutes of its own, then runs these parts, each in a
process of its own with a time limit, those that tell most first:
smoke: `megalite train` with validation and checkpoints, resume, inspect, export and generate, on one card, in plain
torch. ceilings: what copies and matrix products reach. training: some steps of a Llama of 1.1 billion parameters, in
plain torch, with the operators that prove themselves and with torch.compile, and the kernels of a step. prediction:
peak memory and step time of a dozen configurations beside the planner's. decoding: that Llama's generation, beside
transformers. ranks: layouts of several cards over NCCL, whose losses must be those of one rank; left
out where there is one card. selftest: `megalite selftest`. checks: each operator against float64, over poisoned memory
and repeated. parity: every family, optimizer and ZeRO stage of one rank beside the CPU in float64. queues: how CUDA's
hardware queues are shared. times: each operator beside its peers, as a share of a ceiling. fused: training with the
operators that the self-test chose, beside plain torch. scaling: the 3D job over 1 to 16 CPU ranks.

Needs no network, and no package that a part does not use: a part whose packages are missing is left out, and the report
says which to carry. Writes the report into --results after each part, unless a part was left out on the command line. A
part that fails, crashes or runs past its limit is told with its reason, keeps the rows that it had, and the others go
on; the exit code is 1 then, and 2 where there is no GPU.

Attention's forward is that for Hopper where the chip is one; a row of its own has the one for every chip, which
MEGALITE_NO_HOPPER=1 chooses in any run.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import count_cards, hidden_from_ranks
from benchmarks.gpu.tables import NOT_MEASURED, markdown, with_summary

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
BUDGET_SECONDS, LEAST_SECONDS = 560, 5
PERFORMANCE = ROOT / "docs" / "performance.md"
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
Row = dict[str, Any]

__all__ = ["NOT_MEASURED", "PARTS", "main", "markdown"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these")
    parser.add_argument("--operators", metavar="REGEX", default="", help="only those with such a name")
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer over the checks")
    parser.add_argument(
        "--seconds", type=float, default=BUDGET_SECONDS, help=f"for all parts together ({BUDGET_SECONDS})"
    )
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="reports, the later ones count")
    parser.add_argument("--skeleton", action="store_true", help="write the tables with nothing measured")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    # Used by the suite for each part: rows go to this file; report.json beside it has the rows of earlier parts.
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        return perform(options.part[0], Path(options.part[1]), options)
    if options.skeleton:
        (options.results or RESULTS).joinpath("gpu.md").write_text(markdown({}))
        return 0
    if options.read:
        write(joined([json.loads(path.read_text()) for path in options.read]), RESULTS)
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU: torch sees none, so nothing was measured. On a machine without one, --device cpu runs the parts"
            " that need none",
            file=sys.stderr,
        )
        return 2
    if options.sanitize:
        return sanitize(options)
    everything = [name for name, part in PARTS.items() if options.device != "cpu" or part.on_cpu]
    parts = options.parts or everything
    folder = options.results or (RESULTS if parts == everything and not options.operators else None)
    report = run(parts, options, folder if options.device == "cuda" or options.results else None)
    print(markdown(report))
    return 1 if report["failed"] else 0


# --------------------------------------------------------------------------------------------- parts, in this process


def perform(name: str, file: Path, options: argparse.Namespace) -> int:
    """Run a part here, and write {"rows": [...], "failed": why} after each of its rows."""
    found = file.parent / "report.json"
    report = json.loads(found.read_text()) if found.exists() else {}
    done: dict[str, Any] = {"rows": [], "failed": ""}
    try:
        for row in (PARTS | {"facts": FACTS})[name].rows(report, options):
            done["rows"].append(row)
            _write_whole(file, json.dumps(done))
    except Exception as error:
        traceback.print_exc()
        done["failed"] = f"{type(error).__name__}: {error}"
    _write_whole(file, json.dumps(done))
    return 1 if done["failed"] or any(map(_is_wrong, done["rows"])) else 0


def _write_whole(file: Path, text: str) -> None:
    """A reader finds the text before or after, even where this process is killed meanwhile."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text)
    temporary.replace(file)


def _is_wrong(row: Row) -> bool:
    return "failed" in row or row.get("right") is False


def facts(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    """Builds the library if there is none that fits; says what is here."""
    import torch

    from megalite.ops import apex, extension

    if extension.why_not(options.device) and (ROOT / "setup.py").exists():
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, check=False)
        extension.built.cache_clear()
        extension.load.cache_clear()
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git
        commit = ""
    found: Row = {
        "chip": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "cards": count_cards(options.device),
        "torch": torch.__version__,
        "built": extension.why_not(options.device) or extension.built().said,
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "missing": missing(),
    }
    if options.device == "cuda":
        found |= {"cuda": torch.version.cuda, "hip": torch.version.hip, "apex": apex.modules()}
    yield found


def smoke(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.jobs import smoke

    with tempfile.TemporaryDirectory(prefix="megalite-smoke-") as folder:
        yield from smoke(Path(folder), options.device)


def ranks(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.jobs import ranks

    with tempfile.TemporaryDirectory(prefix="megalite-ranks-") as folder:
        yield from ranks(Path(folder), options.device, count_cards(options.device))


def selftest(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.jobs import selftest

    yield from selftest(options.device)


def fused(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.jobs import fused

    with tempfile.TemporaryDirectory(prefix="megalite-fused-") as folder:
        yield from fused(Path(folder), options.device)


def chosen(options: argparse.Namespace) -> list[Any]:
    from benchmarks.gpu.operators import OPERATORS
    from megalite.ops import extension

    if complaint := extension.why_not(options.device):
        raise LookupError(f"no compiled operators: {complaint}")
    return [each for each in OPERATORS if re.search(options.operators, each.name)]


def checks(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.checks import check

    for operator in chosen(options):
        for dtype in operator.dtypes:
            name = {"operator": operator.name, "dtype": str(dtype).removeprefix("torch.")}
            try:
                found = [check(operator, shape, dtype, options.device) for shape in operator.shapes]
                worst = max(found, key=lambda row: row["error_share"])
                equal = all(row["equal_repeats"] for row in found)
                right = all(row["right"] for row in found)
                yield worst | {"equal_repeats": equal, "right": right, "shapes": len(found)}
            except Exception as error:
                traceback.print_exc()
                what = f"{type(error).__name__}: {error}"[:200]
                yield name | {"right": False, "failed": what, "shapes": len(operator.shapes)}


def ceilings(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.clock import ceilings

    yield from ceilings()


def times(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.clock import times

    limits = _limits(report)
    if not limits:
        raise LookupError("no ceilings were measured, of which a time could be a share")
    # Compiling takes most of the time: operators without torch.compile as a peer come first.
    for operator in sorted(chosen(options), key=lambda operator: operator.compiled):
        for dtype in operator.dtypes[-2:-1]:  # of two or more, the last but one: bfloat16
            try:
                yield from times(operator, dtype, limits["copy"], limits["product"])
            except Exception as error:
                traceback.print_exc()
                yield {"operator": operator.name, "failed": f"{type(error).__name__}: {error}"[:200]}


def training(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.training import KERNELS, train

    product, tiny = _limits(report).get("product"), options.device == "cpu"
    for kernels in KERNELS:
        try:
            yield train(kernels, device=options.device, product=product, tiny=tiny)
        except Exception as error:
            traceback.print_exc()
            yield {"kernels": kernels, "failed": f"{type(error).__name__}: {error}"[:200]}


def prediction(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.prediction import prediction

    yield from prediction(options.device)


def decoding(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.decoding import decoding

    yield from decoding(options.device)


def parity(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.parity import parity

    with tempfile.TemporaryDirectory(prefix="megalite-parity-") as folder:
        yield from parity(options.device, Path(folder))


def queues(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.queues import queues

    yield from queues()


def scaling(report: Mapping[str, Any], options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.gpu.training import scaling

    yield from scaling()


def _limits(report: Mapping[str, Any]) -> dict[str, float]:
    return {row["ceiling"]: row["per_second"] for row in report.get("ceilings", [])}


# Modules that a rented machine with torch may lack -> the package that has each.
PACKAGES = {
    "cupy": "cupy-cuda13x",
    "deepspeed": "deepspeed",
    "pydantic": "pydantic",
    "pytest": "pytest",
    "rich": "rich",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
}


def missing() -> list[str]:
    """Return the packages of PACKAGES that are not installed here."""
    return [package for module, package in PACKAGES.items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # blocked, as None in sys.modules
        return False


@dataclass(frozen=True)
class Part:
    """Rows from what the parts before gave; seconds: its limit. on_cpu: whether it has something to show there.

    needs: the modules of PACKAGES without which it is left out.
    """

    rows: Callable[[Mapping[str, Any], argparse.Namespace], Iterator[Row]]
    seconds: float
    on_cpu: bool = False
    needs: tuple[str, ...] = ()


# Before the clock starts: the library may have to be built.
FACTS = Part(facts, 900)
_TRAINING = ("pydantic", "safetensors", "tokenizers")
_COMMANDS = (*_TRAINING, "rich")
PARTS: dict[str, Part] = {
    "smoke": Part(smoke, 75, on_cpu=True, needs=(*_COMMANDS, "transformers")),
    "ceilings": Part(ceilings, 30),
    "training": Part(training, 110, on_cpu=True, needs=_TRAINING),
    "prediction": Part(prediction, 240, on_cpu=True, needs=_TRAINING),
    "decoding": Part(decoding, 60, needs=(*_TRAINING, "transformers")),
    "ranks": Part(ranks, 150, on_cpu=True, needs=_COMMANDS),
    "selftest": Part(selftest, 75, on_cpu=True, needs=_COMMANDS),
    "checks": Part(checks, 75, on_cpu=True),
    "parity": Part(parity, 180, needs=(*_TRAINING, "deepspeed", "pytest")),
    "queues": Part(queues, 40, needs=("cupy",)),
    "times": Part(times, 240),
    "fused": Part(fused, 240, on_cpu=True, needs=_COMMANDS),
    "scaling": Part(scaling, 90, needs=_TRAINING),
}


# --------------------------------------------------------------------------------------- the suite, a process for each


def run(parts: Sequence[str], options: argparse.Namespace, results: Path | None) -> dict[str, Any]:
    """Rows of each part by its name, under "parts" how it ended, under "failed" what went wrong in which."""
    with tempfile.TemporaryDirectory(prefix="megalite-gpu-suite-") as folder:
        here = Path(folder)
        report: dict[str, Any] = {
            "date": date.today().isoformat(),
            "chip": "unknown",
            "failed": {},
            "parts": [],
        }
        _, found, failed = _run_part("facts", here, FACTS.seconds, options)
        report |= found[0] if found else {}
        if failed:
            report["failed"]["facts"] = failed
        started = time.monotonic()
        for name in parts:
            (here / "report.json").write_text(json.dumps(report))
            left = started + options.seconds - time.monotonic()
            left_out = _left_out(PARTS[name], report.get("missing", []), left)
            seconds, rows, failed = 0, [], ""
            if not left_out:
                seconds, rows, failed = _run_part(name, here, min(PARTS[name].seconds, left), options)
            report[name] = rows
            part = {"part": name, "seconds": seconds, "failed": failed, "left_out": left_out}
            report["parts"].append(part | {"commit": report.get("commit", "unknown")})
            report["seconds"] = round(time.monotonic() - started)
            if failed:
                report["failed"][name] = failed
            ending = f", FAILED: {failed}" if failed else f", left out: {left_out}" if left_out else ""
            print(f"{name}: {seconds} s{ending}", file=sys.stderr, flush=True)
            if results is not None:
                write(report, results)
    return report


def _left_out(part: Part, lacking: Sequence[str], seconds: float) -> str:
    """Why a part does not run, or nothing."""
    if needed := [PACKAGES[module] for module in part.needs if PACKAGES[module] in lacking]:
        wheels = "pip download --only-binary=:all: --python-version, on a machine with a network"
        return f"needs {', '.join(needed)}, which is not installed here (carry wheels: {wheels})"
    return "the suite's time was over" if seconds < LEAST_SECONDS else ""


def joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of several on the same chip and torch: of each part the last with rows, else the last that tried.

    Raises ValueError where the chips or the versions of torch are different.
    """
    for fact in ("chip", "torch"):
        if len(found := {report.get(fact, "unknown") for report in reports}) > 1:
            raise ValueError(f"the reports are of different {fact}: {', '.join(sorted(found))}")
    whole: dict[str, Any] = dict(reports[-1]) | {"parts": [], "failed": {}}
    whole["seconds"] = sum(report["seconds"] for report in reports)
    for report in reports:
        if "facts" in report["failed"]:
            whole["failed"]["facts"] = report["failed"]["facts"]
    for name in PARTS:
        tried = [
            (report.get(name, []), {"commit": report.get("commit", "unknown"), **part})
            for report in reports
            for part in report["parts"]
            if part["part"] == name
        ]
        if not tried:
            continue
        whole[name], part = ([each for each in tried if each[0]] or tried)[-1]
        whole["parts"].append(part)
        if part["failed"]:
            whole["failed"][name] = part["failed"]
    return whole


def _run_part(
    name: str, folder: Path, seconds: float, options: argparse.Namespace
) -> tuple[int, list[Row], str]:
    """The seconds that a part took in a process of its own, its rows, and why it failed, or nothing."""
    started, file = time.monotonic(), folder / f"{name}.json"
    ended = _wait_for(command_of(name, file, options), seconds, options.device)
    found = {"rows": [], "failed": "it ended before it wrote anything"}
    if file.exists():
        found = json.loads(file.read_text())
    failed = ended or found["failed"] or _wrong_rows(found["rows"])
    return round(time.monotonic() - started), found["rows"], failed


def command_of(name: str, file: Path, options: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.gpu_suite", "--part", name, str(file)]
    return [*words, "--device", options.device, "--operators", options.operators]


def _wait_for(command: Sequence[str], seconds: float, device: str) -> str:
    """Run a part in a process group of its own; why it did not end by itself, or nothing."""
    environment = hidden_from_ranks(device) | {"PYTHONUNBUFFERED": "1"}
    # Its output goes beside ours as it comes: what a part that hangs said last is read by a person.
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=2, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"stopped after its {seconds:.0f} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The part and what it started; ranks of megalite end with the process that started them."""
    for sent, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 30)):
        try:
            os.killpg(process.pid, sent)
            process.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _wrong_rows(rows: Sequence[Row]) -> str:
    """The first row that failed, and how many did."""
    wrong = [row for row in rows if _is_wrong(row)]
    if not wrong:
        return ""
    first = wrong[0]
    name = next(first[key] for key in ("case", "step", "operator", "kernels", "job") if key in first)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{name}: {first.get('failed', 'it is not right')}{more}"


def sanitize(options: argparse.Namespace) -> int:
    """Each tool of compute-sanitizer over the checks, whose shapes are tiny; 1 if one of them complains."""
    # Every tensor in memory of its own, or reading past one is reading another.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in SANITIZERS:
        print(f"== compute-sanitizer {tool}", flush=True)
        words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--launch-timeout", "0"]
        with tempfile.TemporaryDirectory() as folder:
            command = [*words, *command_of("checks", Path(folder) / "checks.json", options)]
            try:
                done = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            except FileNotFoundError:
                print("compute-sanitizer is not installed", file=sys.stderr)
                return 1
        failed += [tool] if done else []
    print(f"compute-sanitizer: {', '.join(failed) + ' failed' if failed else 'nothing was found'}")
    return 1 if failed else 0


def write(report: Mapping[str, Any], folder: Path) -> None:
    """<date>-gpu-suite-<chip>.json, and the tables as gpu.md."""
    folder.mkdir(parents=True, exist_ok=True)
    chip = re.sub(r"[^a-z0-9]+", "-", report["chip"].lower()).strip("-")
    path = folder / f"{report['date']}-gpu-suite-{chip}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    (folder / "gpu.md").write_text(markdown(report))
    if folder == RESULTS and report.get("training"):
        PERFORMANCE.write_text(with_summary(PERFORMANCE.read_text(), report))


if __name__ == "__main__":
    sys.exit(main())
