"""Runs every ordered pair of layouts: six steps in one, its checkpoint into the other, six more there.

    python -m tests.parity.run_checkpoint_pairs                           all of them; minutes
    python -m tests.parity.run_checkpoint_pairs --part                    those that every change runs
    python -m tests.parity.run_checkpoint_pairs --from tp2 --to "dp2 zero3"

Prints how far the losses and each kind of state end from the uninterrupted run of the layout that wrote, and what is
not to the bit what was written; writes it into benchmarks/results/ after all pairs. Exit code 1 where a pair fails.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from tests.parity.run_matrix import RESULTS
from tests.support.checkpoint_pairs import (
    EVERY_PAIR,
    HALF,
    LAYOUTS,
    PRECISION_PAIRS,
    PRECISIONS,
    WHOLE,
    Pairs,
    pairs_for_every_change,
)
from tests.support.matrix.axes import Settings
from tests.support.parity import FLOAT32_RTOL, ZERO_RTOL
from tests.support.ranks import RankPool


@dataclass(frozen=True)
class Result:
    """The result of a pair: its errors, or why it has none."""

    writer: str
    reader: str
    errors: Mapping[str, float]
    problems: Sequence[str]
    seconds: float

    @property
    def bit_for_bit(self) -> bool:
        return self.writer == self.reader and not self.problems


def run_pairs(pairs: Sequence[tuple[str, str]], layouts: Mapping[str, Settings]) -> list[Result]:
    pool, results = RankPool(), []
    with tempfile.TemporaryDirectory(prefix="megalite-pairs-") as folder:
        table = Pairs(pool, Path(folder), layouts)
        for writer, reader in tqdm(pairs, unit="pair", disable=len(pairs) < 4):
            began = time.perf_counter()
            try:
                outcome = table.run(writer, reader)
                errors, problems = outcome.errors, outcome.problems
            except Exception as error:  # whatever it is: the other pairs are still to be run
                errors, problems = {}, [f"{type(error).__name__}: {error}"]
            results.append(Result(writer, reader, errors, problems, round(time.perf_counter() - began, 2)))
            if problems:
                tqdm.write(f"{writer} -> {reader}: {problems[0].splitlines()[0]}")
    pool.close()
    return results


def worst(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Layout that reads -> quantity -> the largest error from any that wrote."""
    found: dict[str, dict[str, float]] = {}
    for result in results:
        errors = found.setdefault(result.reader, {})
        for what, error in result.errors.items():
            errors[what] = max(errors.get(what, 0.0), error)
    return found


def report(results: Sequence[Result]) -> Iterator[str]:
    yield f"{'worst relative error, going on in':36}{'pairs':>6}{'same':>6}  of losses and state at the end"
    for reader, errors in worst(results).items():
        own = [each for each in results if each.reader == reader]
        bits = "bits" if any(each.bit_for_bit for each in own) else ""
        cells = "  ".join(f"{what} {error:.1e}" for what, error in errors.items())
        yield f"{reader:36}{len(own):6}{bits:>6}  {cells}"
    for result in results:
        for problem in result.problems:
            yield f"\n{result.writer} -> {result.reader} FAILS: {problem}"


def write_results(tables: Mapping[str, Sequence[Result]], seconds: float) -> Path:
    path = RESULTS / f"{date.today().isoformat()}-checkpoint-pairs.json"
    every = [result for results in tables.values() for result in results]
    content = {
        "date": date.today().isoformat(),
        "command": "python -m tests.parity.run_checkpoint_pairs",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "deepspeed")},
        "seconds": round(seconds, 1),
        "steps": {"before": HALF, "after": WHOLE - HALF},
        "allowed": {"losses": ZERO_RTOL, "state": FLOAT32_RTOL, "same layout": "bit for bit"},
        "layouts": {"layouts": LAYOUTS, "precisions": PRECISIONS},
        "failed": [[each.writer, each.reader] for each in every if each.problems],
        "worst": {name: worst(results) for name, results in tables.items()},
    }
    tables_text = ",\n".join(
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(asdict(each))}" for each in results) + "\n  ]"
        for name, results in tables.items()
    )
    text = json.dumps(content, indent=2).removesuffix("\n}")
    path.write_text(f"{text},\n{tables_text}\n}}\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="run_checkpoint_pairs"
    )
    parser.add_argument("--from", dest="writer", metavar="LAYOUT", help="only what this layout wrote")
    parser.add_argument("--to", dest="reader", metavar="LAYOUT", help="only what this layout reads")
    parser.add_argument("--part", action="store_true", help="only the pairs that every change runs")
    arguments = parser.parse_args()
    chosen = {
        "layouts": pairs_for_every_change() if arguments.part else EVERY_PAIR,
        "precisions": [] if arguments.part else PRECISION_PAIRS,
    }
    layouts = {"layouts": LAYOUTS, "precisions": PRECISIONS}
    asked = {
        name: [
            (writer, reader)
            for writer, reader in pairs
            if arguments.writer in (None, writer) and arguments.reader in (None, reader)
        ]
        for name, pairs in chosen.items()
    }
    if not any(asked.values()):
        parser.error(f"no pair is like that; layouts are {', '.join([*LAYOUTS, *PRECISIONS])}")
    began = time.perf_counter()
    tables = {name: run_pairs(pairs, layouts[name]) for name, pairs in asked.items() if pairs}
    seconds = time.perf_counter() - began
    for results in tables.values():
        print(*report(results), sep="\n")
    every = [result for results in tables.values() for result in results]
    failed = sum(bool(result.problems) for result in every)
    print(f"{len(every)} pairs in {seconds:.0f} s, {failed} fail")
    if asked == {"layouts": EVERY_PAIR, "precisions": PRECISION_PAIRS}:
        print(f"written to {write_results(tables, seconds)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
