"""Everything a GPU has to show, in one command of less than eight minutes.

    python -m benchmarks.gpu_suite                    # on a machine with a GPU
    python -m benchmarks.gpu_suite --sanitize         # compute-sanitizer over tiny shapes, nothing else
    python -m benchmarks.gpu_suite --device cpu       # the checks alone, of the operators' twins for the CPU
    python -m benchmarks.gpu_suite --skeleton         # benchmarks/results/gpu.md with nothing measured

Builds or loads the compiled operators, then: checks each against float64, over poisoned memory and repeated; measures
what copies and matrix products reach; times each operator beside its peers as a share of that; trains a Llama of 1.1
billion parameters for some steps; runs the 3D job over 1 to 16 CPU ranks. Prints the tables, and writes them into
benchmarks/results unless a part was left out. A part that fails is told, and the others go on; the exit code is 1
then, and 2 where there is no GPU.

Attention's forward is that for Hopper where the chip is one; a row of its own has the one for every chip, which
MEGALITE_NO_HOPPER=1 chooses in any run.

torch 2.11 is enough; the Trainer wants megalite's other requirements too (pydantic, tokenizers, safetensors).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
NOT_MEASURED = "not measured"
BUDGET_SECONDS = 460
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
Rows = list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="only these")
    parser.add_argument("--operators", metavar="REGEX", default="", help="only those with such a name")
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer over the checks")
    parser.add_argument("--skeleton", action="store_true", help="write the tables with nothing measured")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help=f"default: {RESULTS.relative_to(ROOT)}"
    )
    options = parser.parse_args(arguments)
    if options.skeleton:
        (options.results or RESULTS).joinpath("gpu.md").write_text(markdown({}))
        return 0
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU: torch sees none, so nothing was measured. On a machine without one, --device cpu checks the"
            " operators' twins for the CPU",
            file=sys.stderr,
        )
        return 2
    if complaint := built(options.device):
        print(f"no compiled operators: {complaint}", file=sys.stderr)
        return 1
    if options.sanitize:
        return sanitize(options)
    parts = ["checks"] if options.device == "cpu" else options.parts
    report = run(parts, options)
    print(markdown(report))
    complete = set(parts) == set(PARTS) and not options.operators
    if complete or options.results:
        write(report, options.results or RESULTS)
    return 1 if report["failed"] or any(not row["right"] for row in report.get("checks", [])) else 0


def built(device: str) -> str:
    """Builds the library if there is none that fits; why there is still none, or nothing."""
    from megalite.ops import extension

    if extension.why_not(device) and (ROOT / "setup.py").exists():
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, check=False)
        extension.built.cache_clear()
        extension.load.cache_clear()
    return extension.why_not(device)


# ------------------------------------------------------------------------------------------------------------- parts


def run(parts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """What each part gave, and under "failed" what went wrong in which."""
    started = time.monotonic()
    report: dict[str, Any] = {**facts(options.device), "failed": {}}
    for name in parts:
        before = time.monotonic()
        try:
            report[name] = PARTS[name](report, options, started + BUDGET_SECONDS)
        except Exception as error:
            traceback.print_exc()
            report["failed"][name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {time.monotonic() - before:.0f} s", file=sys.stderr, flush=True)
    report["seconds"] = round(time.monotonic() - started)
    return report


def facts(device: str) -> dict[str, Any]:
    import torch

    from megalite.ops import apex, extension

    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "chip": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "built": extension.built().said,
    }
    if device == "cuda":
        found |= {"cuda": torch.version.cuda, "apex": apex.choices()}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found | {"commit": commit.stdout.strip() or "unknown"}


def chosen(options: argparse.Namespace) -> list[Any]:
    from benchmarks.gpu.operators import OPERATORS

    return [each for each in OPERATORS if re.search(options.operators, each.name)]


def checks(report: dict[str, Any], options: argparse.Namespace, deadline: float) -> Rows:
    from benchmarks.gpu.checks import check

    rows: Rows = []
    for operator in chosen(options):
        for dtype in operator.dtypes:
            name = {"operator": operator.name, "dtype": str(dtype).removeprefix("torch.")}
            try:
                found = [check(operator, shape, dtype, options.device) for shape in operator.shapes]
                worst = max(found, key=lambda row: row["error_share"])
                equal = all(row["equal_repeats"] for row in found)
                right = all(row["right"] for row in found)
                rows.append(worst | {"equal_repeats": equal, "right": right, "shapes": len(found)})
            except Exception as error:
                traceback.print_exc()
                what = f"{type(error).__name__}: {error}"[:200]
                rows.append(name | {"right": False, "failed": what, "shapes": len(operator.shapes)})
    return rows


def ceilings(report: dict[str, Any], options: argparse.Namespace, deadline: float) -> Rows:
    from benchmarks.gpu.clock import ceilings

    return ceilings()


def times(report: dict[str, Any], options: argparse.Namespace, deadline: float) -> Rows:
    from benchmarks.gpu.clock import times

    limits = {row["ceiling"]: row["per_second"] for row in report["ceilings"]}
    rows: Rows = []
    for operator in chosen(options):
        for dtype in operator.dtypes[-2:-1]:  # of two or more, the last but one: bfloat16
            try:
                if time.monotonic() > deadline - 200:
                    raise TimeoutError("no time was left")
                rows += times(operator, dtype, limits["copy"], limits["product"])
            except Exception as error:
                traceback.print_exc()
                report["failed"][f"times of {operator.name}"] = f"{type(error).__name__}: {error}"[:200]
    return rows


def training(report: dict[str, Any], options: argparse.Namespace, deadline: float) -> Rows:
    from benchmarks.gpu.training import KERNELS, train

    limits = {row["ceiling"]: row["per_second"] for row in report.get("ceilings", [])}
    return [train(each, device=options.device, product=limits.get("product")) for each in KERNELS]


def scaling(report: dict[str, Any], options: argparse.Namespace, deadline: float) -> Rows:
    from benchmarks.gpu.training import scaling

    return scaling()


PARTS: dict[str, Callable[[dict[str, Any], argparse.Namespace, float], Rows]] = {
    "checks": checks,
    "ceilings": ceilings,
    "times": times,
    "training": training,
    "scaling": scaling,
}


def sanitize(options: argparse.Namespace) -> int:
    """Each tool of compute-sanitizer over the checks, whose shapes are tiny; 1 if one of them complains."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--parts", "checks"]
    command += ["--operators", options.operators]
    # Every tensor in memory of its own, or reading past one is reading another.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in SANITIZERS:
        print(f"== compute-sanitizer {tool}", flush=True)
        words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--launch-timeout", "0"]
        try:
            done = subprocess.run([*words, *command], cwd=ROOT, env=environment, check=False).returncode
        except FileNotFoundError:
            print("compute-sanitizer is not installed", file=sys.stderr)
            return 1
        failed += [tool] if done else []
    print(f"compute-sanitizer: {', '.join(failed) + ' failed' if failed else 'nothing was found'}")
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------------------------ tables


def markdown(report: Mapping[str, Any]) -> str:
    """All tables; what the report lacks is not measured."""
    lines = ["# The operators on a GPU", ""]
    if report:
        lines += [
            f"{report['date']}, {report['chip']}, torch {report['torch']}, commit {report['commit'][:12]}."
        ]
        lines += ["", f"{report['built']}. {report['seconds']} s in all."]
    else:
        lines += [f"On a GPU: {NOT_MEASURED} yet."]
    lines += [
        "",
        "Written by `python -m benchmarks.gpu_suite`, whose help says what is measured; not edited by hand.",
    ]
    for name, reason in report.get("failed", {}).items():
        lines += ["", f"**{name} failed**: {reason}"]
    for title, table in (
        ("Correctness: the error's share of what is allowed", _checks_table(report)),
        ("Ceilings", _ceilings_table(report)),
        ("Times, as shares of the ceiling", _times_table(report)),
        ("Training a Llama of 1.1 billion parameters, bf16, 2048 tokens a sequence", _training_table(report)),
        ("The 3D job over CPU ranks", _scaling_table(report)),
    ):
        lines += ["", f"## {title}", "", *table]
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    words = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(str(word).replace("|", "/") for word in row) + " |" for row in words]


def _checks_table(report: Mapping[str, Any]) -> list[str]:
    from benchmarks.gpu.operators import OPERATORS

    found = {(row["operator"], row["dtype"]): row for row in report.get("checks", [])}
    rows = []
    for operator in OPERATORS:
        for dtype in (str(each).removeprefix("torch.") for each in operator.dtypes):
            row = found.get((operator.name, dtype))
            if row is None:
                said = [NOT_MEASURED, NOT_MEASURED, NOT_MEASURED]
            elif "failed" in row:
                said = [row["failed"], "", "no"]
            else:
                equal = "yes" if row["equal_repeats"] else "NO"
                said = [f"{row['error_share']:.2f}", equal, "yes" if row["right"] else "NO"]
            rows.append([operator.name, dtype, *said])
    return _table(["operator", "type", "error / allowed", "repeats are equal", "right"], rows)


def _ceilings_table(report: Mapping[str, Any]) -> list[str]:
    units = {"copy": "TB/s, read and written", "product": "TFLOP/s, bf16"}
    found = {row["ceiling"]: f"{row['per_second'] / 1e12:.2f}" for row in report.get("ceilings", [])}
    return _table(
        ["ceiling", "reached"], [[f"{n}, {unit}", found.get(n, NOT_MEASURED)] for n, unit in units.items()]
    )


def _times_table(report: Mapping[str, Any]) -> list[str]:
    from benchmarks.gpu.operators import OPERATORS

    found = {(row["operator"], row["direction"]): row for row in report.get("times", [])}
    rows = []
    for operator in OPERATORS:
        for index, direction in enumerate(operator.directions):
            target = f"{operator.targets[index]:.0%}"
            row = found.get((operator.name, direction))
            if row is None:
                rows.append([operator.name, direction, NOT_MEASURED, NOT_MEASURED, target, NOT_MEASURED])
                continue
            peers = "; ".join(f"{name}: {ms}" for name, ms in row["peers_ms"].items())
            rate = f"{row['ms']} ({row['per_second'] / 1e12:.2f} T{row['unit']})"
            rows.append(
                [f"{operator.name}, {row['shape']}", direction, rate, f"{row['share']:.0%}", target, peers]
            )
    return _table(["operator", "direction", "ms", "share of the ceiling", "target", "peers, ms"], rows)


def _training_table(report: Mapping[str, Any]) -> list[str]:
    keys = {
        "kernels": "model.kernels",
        "step_seconds": "step, s",
        "tokens_per_second": "tokens/s",
        "mfu": "MFU (data sheet)",
        "share_of_product": "of measured products",
        "peak_memory_gib": "peak GiB",
        "last_loss": "last loss",
    }
    rows = report.get("training") or [{"kernels": each} for each in ("reference", "fused")]
    return _table([*keys.values()], [[row.get(key, NOT_MEASURED) for key in keys] for row in rows])


def _scaling_table(report: Mapping[str, Any]) -> list[str]:
    keys = {"ranks": "ranks", "layout": "layout", "tokens_per_second": "tokens/s", "speedup": "speedup"}
    rows = report.get("scaling") or [{"ranks": ranks} for ranks in (1, 2, 4, 8, 16)]
    return _table(
        [*keys.values()],
        [[row.get(key, row.get("left_out", NOT_MEASURED)) for key in keys] for row in rows],
    )


def write(report: Mapping[str, Any], folder: Path) -> None:
    """<date>-gpu-suite-<chip>.json, and the tables as gpu.md."""
    folder.mkdir(parents=True, exist_ok=True)
    chip = re.sub(r"[^a-z0-9]+", "-", report["chip"].lower()).strip("-")
    path = folder / f"{report['date']}-gpu-suite-{chip}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    (folder / "gpu.md").write_text(markdown(report))
    print(f"written to {path} and {folder / 'gpu.md'}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
