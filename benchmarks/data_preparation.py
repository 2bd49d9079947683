"""From text to ids on two cores: `megalite data prepare` against `datasets.map` with the same tokenizer; its memory.

    python -m benchmarks.data_preparation [--text FILE] [--megabytes 30] [--memory 10 100] [--rounds 3] [--quick]

The text (by default the Python library's sources) is repeated to a .jsonl of so many MB, in documents of about 2000
characters; a byte-level BPE of 16384 ids (4096 with --quick) is trained on it, or read from --tokenizer. Rounds
alternate between the cases, each in a process of its own, and the ids of both are compared to the last:

megalite     the whole command with two workers, from the start of its process to the published files.
datasets     the whole program likewise: load_dataset("json"), then map(batched=True, num_proc=2) of the tokenizer that
             AutoTokenizer loads, with the end of each document; the ids lie in Arrow files then.
map alone    of the latter, the call of map(): imports, reading the .jsonl, and the start are left out.

CPU          seconds of all processes together, the least of all rounds: another program that is busy changes it little.
peak RSS     the most that the process and its children held together, looked at every 20 ms; what they share, as the
             code of libraries, counts in each. For --memory, of megalite alone, by the size of the input.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from megalite.data.text.corpus import Corpus
from megalite.data.text.standard_library import STANDARD_LIBRARY

ROOT = Path(__file__).parents[1]
WORKERS = 2
VOCABULARY, QUICK_VOCABULARY = 16384, 4096
DOCUMENT_CHARACTERS = 2000
MB = 10**6
LOOK_SECONDS = 0.02

# Run as a program: what a user of `datasets` writes. It prints the seconds of map(), then writes the ids.
DATASETS = """
import os, sys, time
folder, source, tokenizer_folder, ids_file = sys.argv[1:5]
os.environ.update(HF_HOME=folder, HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
import datasets, numpy
from transformers import AutoTokenizer
rows = datasets.load_dataset("json", data_files=source, split="train")
tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
def encode(batch):
    ids = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
    return {"ids": [each + [tokenizer.eos_token_id] for each in ids]}
started = time.perf_counter()
encoded = rows.map(encode, batched=True, num_proc=%d, remove_columns=rows.column_names)
print("map", time.perf_counter() - started, flush=True)
with open(ids_file, "wb") as file:
    for chunk in encoded.data.column("ids").chunks:
        file.write(chunk.flatten().to_numpy().astype(numpy.uint16))
"""


@dataclass(frozen=True)
class Run:
    """Seconds to the point that is compared, those of all processors, the peak RSS in MiB, and what was printed."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    output: str


def own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, metavar="FILE", help="any UTF-8 text to repeat")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="a Hugging Face tokenizer of <|endoftext|>"
    )
    parser.add_argument("--megabytes", type=int, default=30, help="of the text that both encode")
    parser.add_argument(
        "--memory", type=int, nargs="*", default=[10, 100], metavar="MB", help="sizes of the text"
    )
    parser.add_argument("--rounds", type=int, default=3)


def documents(text: Path | None) -> list[str]:
    """The text in documents of whole lines."""
    found, lines, size = [], [], 0
    for piece, _ in Corpus.open([STANDARD_LIBRARY if text is None else str(text)]).pieces():
        for line in piece.text.splitlines(keepends=True):
            lines.append(line)
            size += len(line)
            if size >= DOCUMENT_CHARACTERS:
                found.append("".join(lines))
                lines, size = [], 0
    return [*found, "".join(lines)] if size else found


def write_corpus(path: Path, texts: Sequence[str], megabytes: int) -> Path:
    """`texts` over and over, in a .jsonl of so many MB."""
    written = 0
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * MB:
            for line in rows:
                written += file.write(line)
                if written >= megabytes * MB:
                    break
    return path


def descendants(process: int) -> Iterator[int]:
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        below = [int(child) for each in threads for child in (each / "children").read_text().split()]
    except OSError:
        return  # it ended
    for child in below:
        yield child
        yield from descendants(child)


def resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def cpu_seconds_of_children() -> float:
    """Return the CPU seconds of all ended child processes and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watched(command: Sequence[str], until: str | None = None) -> Run:
    """Run to the end; the time ends there too, or with the line that begins with `until`."""
    started, before = time.perf_counter(), cpu_seconds_of_children()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
        peak = 0
        reached = None
        while process.poll() is None:
            peak = max(peak, sum(map(resident_bytes, [process.pid, *descendants(process.pid)])))
            output.seek(0)
            if until is not None and reached is None and f"{until} " in output.read():
                reached = time.perf_counter()
            time.sleep(LOOK_SECONDS)
        seconds = (reached or time.perf_counter()) - started
        output.seek(0)
        said = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{said}")
    return Run(seconds, cpu_seconds_of_children() - before, peak / 2**20, said)


def prepare(source: Path, tokenizer: Path, output: Path) -> Run:
    for old in output.parent.glob(f"{output.name}.*"):
        old.unlink()
    command = [sys.executable, "-m", "megalite", "data", "prepare", "--source", str(source)]
    command += ["--tokenizer", str(tokenizer), "--output", str(output), "--workers", str(WORKERS)]
    return watched(command)


def map_with_datasets(source: Path, tokenizer: Path, ids: Path) -> tuple[Run, float]:
    """The whole program, and the seconds of map() alone."""
    with tempfile.TemporaryDirectory(dir=ids.parent) as cache:
        command = [sys.executable, "-c", DATASETS % WORKERS, cache, str(source), str(tokenizer), str(ids)]
        run = watched(command, until="map")
    [seconds] = [line.split()[1] for line in run.output.splitlines() if line.startswith("map ")]
    return run, float(seconds)


def speed(source: Path, tokenizer: Path, folder: Path, rounds: int) -> list[dict[str, object]]:
    """Tokens a second of each case; raises SystemExit where the ids differ."""
    seconds: dict[str, list[float]] = {"megalite": [], "datasets": [], "map alone": []}
    peaks = {"megalite": 0.0, "datasets": 0.0}
    used: dict[str, list[float]] = {"megalite": [], "datasets": []}
    tokens = 0
    for _ in range(rounds):
        ours = prepare(source, tokenizer, folder / "ours")
        theirs, of_map = map_with_datasets(source, tokenizer, folder / "theirs.ids")
        ids = (folder / "ours.bin").read_bytes()
        if ids != (folder / "theirs.ids").read_bytes():
            raise SystemExit("the ids differ")
        tokens = len(ids) // 2
        for case, run in (("megalite", ours), ("datasets", theirs)):
            seconds[case].append(run.seconds)
            used[case].append(run.cpu_seconds)
            peaks[case] = max(peaks[case], run.peak_mib)
        seconds["map alone"].append(of_map)
    fastest = min(seconds["megalite"])
    return [
        {
            "case": case,
            "median_seconds": round(statistics.median(each), 2),
            "fastest_seconds": round(min(each), 2),
            "cpu_seconds": round(min(used[case]), 2) if case in used else None,
            "tokens_per_second": round(tokens / statistics.median(each)),
            "fastest_over_megalites": round(min(each) / fastest, 2),
            "peak_mib": round(peaks[case]) if case in peaks else None,
        }
        for case, each in seconds.items()
    ]


def memory(
    texts: Sequence[str], tokenizer: Path, folder: Path, sizes: Sequence[int]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for size in sizes:
        source = write_corpus(folder / "by_size.jsonl", texts, size)
        run = prepare(source, tokenizer, folder / "memory")
        tokens = (folder / "memory.bin").stat().st_size // 2
        rows.append(
            {
                "case": f"{size} MB of text",
                "seconds": round(run.seconds, 1),
                "tokens": tokens,
                "tokens_per_second": round(tokens / run.seconds),
                "peak_mib": round(run.peak_mib),
            }
        )
    return rows


def trained_tokenizer(source: Path, folder: Path, vocabulary: int) -> Path:
    command = [sys.executable, "-m", "megalite", "tokenizer", "train", "--source", str(source)]
    watched([*command, "--vocab-size", str(vocabulary), "--output", str(folder)])
    return folder


def main() -> None:
    parser = report.parser_of(__doc__)
    own_arguments(parser)
    options = report.arguments_of(parser)
    try:
        import datasets
        import tokenizers
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing; install it: pip install 'megalite[benchmark]'") from error
    sizes = [1, 2] if options.quick else options.memory
    megabytes, rounds = (1, 1) if options.quick else (options.megabytes, options.rounds)
    vocabulary = QUICK_VOCABULARY if options.quick else VOCABULARY
    facts = report.machine()
    texts = documents(options.text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_corpus(folder / "text.jsonl", texts, megabytes)
        tokenizer = options.tokenizer or trained_tokenizer(source, folder / "tokenizer", vocabulary)
        rows = speed(source, tokenizer, folder, rounds)
        by_size = memory(texts, tokenizer, folder, sizes)
    seconds = {
        "median_seconds": "seconds",
        "fastest_seconds": "fastest",
        "cpu_seconds": "CPU",
        "fastest_over_megalites": "over megalite's",
    }
    columns = {"case": "", **seconds, "tokens_per_second": "tokens/s", "peak_mib": "peak RSS, MiB"}
    report.show(f"{megabytes} MB of text, {WORKERS} workers", rows, columns)
    columns = {"case": "", "seconds": "seconds", "tokens": "tokens", "tokens_per_second": "tokens/s"}
    report.show("by the size of the text", by_size, {**columns, "peak_mib": "peak RSS, MiB"})
    settings = {
        "quick": options.quick,
        "megabytes": megabytes,
        "workers": WORKERS,
        "rounds": rounds,
        "datasets": datasets.__version__,
        "tokenizers": tokenizers.__version__,
    }
    report.write("data-preparation", facts, settings, [*rows, *by_size], options.results)


if __name__ == "__main__":
    main()
