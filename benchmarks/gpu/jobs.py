"""A user's jobs on a card, by the commands that a user types: the first parts of the GPU suite."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Sources that every Python has: half a megabyte of text, without a network.
LIBRARY = Path(json.__file__).parents[1]
SOURCES = [str(LIBRARY / "json"), str(LIBRARY / "email")]
STEPS, SAVED_AT, RANK_STEPS = 8, 4, 3
COMMAND_SECONDS, SELFTEST_SECONDS, FIRST_RUN_SECONDS = 90, 200, 300
NEW_TOKENS = 16
# A resumed run repeats a run's losses to the bit on a CPU; on a GPU attention's backward adds in any order.
RESUMED_BOUND = {"cpu": 0.0}
GPU_RESUMED_BOUND = 1e-2
# In low precision, where kernels round at other places.
KERNELS_BOUND = 1e-2
# In float32, whatever the layout: sums in another order.
LAYOUT_BOUND = 1e-4

Row = dict[str, Any]


class StepError(Exception):
    """A step did not show the expected result."""


def megalite(
    *words: str, seconds: float = COMMAND_SECONDS, codes: Sequence[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run a command of megalite. Raises StepError where it takes longer or ends with another exit code."""
    command = [sys.executable, "-m", "megalite", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end with it
            raise StepError(f"megalite {words[0]} took longer than {seconds:.0f} s") from None
    if process.returncode not in codes:
        said = (errors.strip() or output.strip())[-2000:]
        print(said, file=sys.stderr)
        raise StepError(f"megalite {words[0]} ended with exit code {process.returncode}: {said[-300:]}")
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@dataclass(frozen=True)
class Smoke:
    """Where the smoke job works, and on which kind of device."""

    folder: Path
    device: str

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def train(self, run: Path, **settings: Any) -> list[Row]:
        """Train with these settings laid over the common ones (`section__key`); the steps' records."""
        small = self.device == "cpu"
        given = {
            "run__folder": str(run),
            "model__hidden_size": 64 if small else 512,
            "model__intermediate_size": 128 if small else 1408,
            "model__num_hidden_layers": 4,
            "model__num_attention_heads": 4 if small else 8,
            "model__num_key_value_heads": 2,
            "model__kernels": "reference",
            "model__max_position_embeddings": 64 if small else 512,
            "training__sequence_length": 64 if small else 512,
            "training__steps": STEPS,
            "training__micro_batch_size": 2,
            "training__global_batch_size": 8,
            "optimizer__learning_rate": 1e-3,
            "optimizer__schedule": "constant",
            "tokenizer__vocab_size": 512,
            "data__source": SOURCES,
            "data__pattern": "*.py",
            "checkpoint__export": False,
        } | settings
        words = [
            word
            for key, value in given.items()
            for word in (
                f"--{key.replace('__', '.')}",
                value if isinstance(value, str) else json.dumps(value),
            )
        ]
        file = self.folder / "run.toml"
        file.touch()  # every setting is a flag
        # On a card the first run of a model tests its operators.
        proof = 0.0 if given["model__kernels"] == "reference" else FIRST_RUN_SECONDS
        megalite("train", str(file), *words, seconds=COMMAND_SECONDS + proof)
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    def on_the_device(self, record: Row) -> str:
        """Return a record's figures of device memory. Raises StepError if the run was on the CPU."""
        if self.device == "cpu":
            return f"{record['memory_bytes'] / 2**30:.2f} GiB"
        if "reserved_bytes" not in record:
            raise StepError(f"metrics.jsonl has no reserved_bytes: the run was not on a {self.device} device")
        return f"{record['memory_bytes'] / 2**30:.2f} GiB of {record['reserved_bytes'] / 2**30:.2f} reserved"


# ------------------------------------------------------------------------------------------------- smoke, on one card


def smoke(folder: Path, device: str) -> Iterator[Row]:
    """Train and validate, resume, export, generate, in plain torch: a row each, with what failed."""
    job = Smoke(folder, device)
    for number, (name, step) in enumerate(SMOKE_STEPS.items()):
        row = timed(name, lambda step=step: step(job))
        yield row
        if number == 0 and "failed" in row:
            return  # the others need its run


def timed(name: str, step: Callable[[], str]) -> Row:
    """Run a step; return its message and duration, or its failure."""
    started = time.monotonic()
    try:
        said = {"said": step()}
    except Exception as error:
        what = str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        said = {"failed": what[:500]}
    return {"step": name, "seconds": round(time.monotonic() - started, 1), **said}


def train_and_validate(job: Smoke) -> str:
    records = job.train(
        job.run,
        data__split=[0.9, 0.1],
        validation__every=SAVED_AT,
        validation__samples=8,
        checkpoint__every=SAVED_AT,
    )
    losses = [record["loss"] for record in records]
    validated = [record["validation_loss"] for record in records if "validation_loss" in record]
    if not all(math.isfinite(loss) for loss in [*losses, *validated]) or losses[-1] >= losses[0]:
        raise StepError(f"the loss did not fall: {losses}, validation {validated}")
    if len(losses) != STEPS or len(validated) != STEPS // SAVED_AT:
        found = f"{len(losses)} and {len(validated)} are in metrics.jsonl"
        raise StepError(f"{STEPS} steps and {STEPS // SAVED_AT} validations were asked for, {found}")
    last = records[-1]
    return (
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, validation {validated[-1]:.3f},"
        f" {last['tokens_per_second']:,.0f} tokens/s, {job.on_the_device(last)}"
    )


def resume(job: Smoke) -> str:
    """Go on from the middle of the run in another folder: the same losses."""
    checkpoint = job.run / "checkpoints" / f"step-{SAVED_AT:06d}"
    again = job.train(
        job.folder / "resumed",
        data__split=[0.9, 0.1],
        validation__samples=8,
        checkpoint__resume=str(checkpoint),
    )
    before = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    pairs = [(one["loss"], other["loss"]) for one, other in zip(before[SAVED_AT:], again, strict=True)]
    apart = max(abs(one - other) / abs(one) for one, other in pairs)
    if not apart <= RESUMED_BOUND.get(job.device, GPU_RESUMED_BOUND):
        raise StepError(f"losses before and after resuming: {pairs}")
    return f"{len(pairs)} losses, at most {apart:.1e} from those of the run that went on"


def inspect(job: Smoke) -> str:
    return megalite("convert", "inspect", str(job.run)).stdout.splitlines()[0].partition(": ")[2]


def export(job: Smoke) -> str:
    """transformers is asked whether the exported model computes the same."""
    output = megalite("convert", "export", str(job.run), str(job.folder / "export")).stdout
    return " ".join(output.splitlines()[-1].split())


def generate(job: Smoke) -> str:
    done = megalite("generate", str(job.run), "--prompt", "import ", "--tokens", str(NEW_TOKENS))
    if not done.stdout.startswith("import "):
        raise StepError(f"the text does not begin with its prompt: {done.stdout[:200]!r}")
    return done.stderr.strip().rpartition(": ")[2]


def losses_of(records: Sequence[Row]) -> str:
    return "losses " + ", ".join(f"{record['loss']:.4f}" for record in records)


SMOKE_STEPS: dict[str, Callable[[Smoke], str]] = {
    "train, validate, save": train_and_validate,
    "resume": resume,
    "inspect": inspect,
    "export": export,
    "generate": generate,
}


# ------------------------------------------------------------------------------------------------ ranks, on many cards

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2": {"parallel__tensor": 2},
    "tensor 2, sequence": {"parallel__tensor": 2, "parallel__sequence": True},
    "pipeline 2": {"parallel__pipeline": 2},
    "data 2": {"parallel__data": 2},
    "data 2, ZeRO 1": {"parallel__data": 2, "deepspeed__zero_optimization__stage": 1},
    "tensor 2, data 2": {"parallel__tensor": 2, "parallel__data": 2},
    "tensor 2, pipeline 2, data 2": {
        "parallel__tensor": 2,
        "parallel__pipeline": 2,
        "parallel__data": 2,
        "parallel__schedule": "interleaved_1f1b",
    },
}
ON_CPU = ("tensor 2", "pipeline 2", "data 2")


def ranks_of(settings: dict[str, Any]) -> int:
    return math.prod(settings.get(f"parallel__{axis}", 1) for axis in ("tensor", "pipeline", "data"))


def ranks(folder: Path, device: str, cards: int) -> Iterator[Row]:
    """Each layout that the cards allow: its losses and gradient norms beside those of one rank, in float32.

    SGD, because Adam forgives a gradient that is wrong by a constant factor.
    """
    if cards < 2:
        yield {"step": "all layouts", "left_out": "one card is here"}
        return
    job = Smoke(folder, device)
    common = {"training__steps": RANK_STEPS, "training__precision": "fp32"}
    common |= {"optimizer__name": "sgd", "optimizer__learning_rate": 0.1}
    alone: list[Row] = []

    def single() -> str:
        alone.extend(job.train(folder / "alone", **common))
        return f"{losses_of(alone)}, {job.on_the_device(alone[-1])}"

    row = timed("one rank", single)
    yield row
    if "failed" in row:
        return
    for name, settings in LAYOUTS.items():
        if ranks_of(settings) > cards:
            yield {"step": name, "left_out": f"needs {ranks_of(settings)} cards, {cards} are here"}
        elif device != "cpu" or name in ON_CPU:
            yield timed(
                name, lambda settings=settings, name=name: like_one_rank(job, name, alone, common | settings)
            )


def like_one_rank(job: Smoke, name: str, alone: Sequence[Row], settings: dict[str, Any]) -> str:
    together = job.train(job.folder / name.replace(", ", "-").replace(" ", ""), **settings)
    apart = {
        key: max(
            abs(one[key] - other[key]) / abs(one[key]) for one, other in zip(alone, together, strict=True)
        )
        for key in ("loss", "grad_norm")
    }
    if not max(apart.values()) <= LAYOUT_BOUND:
        raise StepError(f"apart from one rank's by more than {LAYOUT_BOUND:.0e}: {apart}")
    return (
        f"loss within {apart['loss']:.1e} and gradient norm within {apart['grad_norm']:.1e} of one rank's,"
        f" {job.on_the_device(together[-1])}"
    )


# ----------------------------------------------------------------------------------------------------------- selftest


def selftest(device: str) -> Iterator[Row]:
    """The lines of `megalite selftest`. Raises StepError where an operator is wrong or none could be tested."""
    done = megalite("selftest", "--device", device, seconds=SELFTEST_SECONDS, codes=(0, 1))
    for line in done.stdout.splitlines():
        yield {"said": line}
    if done.returncode:
        raise StepError(done.stderr.strip()[-300:] or "an operator is wrong, crashed or hung: see its line")


# ------------------------------------------------------------------------------------- what the selftest chose, at work

OPTIONS: dict[str, dict[str, Any]] = {
    "documents, window, dropout, recompute": {
        "model__family": "mistral",
        "model__sliding_window": 24,
        "model__attention_dropout": 0.1,
        "model__residual_dropout": 0.1,
        "data__document_mask": True,
        "training__recompute": "selective",
    },
    "fp16": {"training__precision": "fp16"},
    "plain": {},
}


def fused(folder: Path, device: str) -> Iterator[Row]:
    """Train with `model.kernels` = "auto", as the self-test chose, beside "reference": the losses are alike."""
    job = Smoke(folder, device)
    for number, (name, settings) in enumerate(OPTIONS.items()):
        yield timed(name, lambda settings=settings, number=number: like_plain_torch(job, number, settings))


def like_plain_torch(job: Smoke, number: int, settings: dict[str, Any]) -> str:
    common = settings | {"training__steps": RANK_STEPS}
    plain = job.train(job.folder / f"reference-{number}", **common)
    chosen = job.train(job.folder / f"auto-{number}", **common, model__kernels="auto")
    apart = max(
        abs(one["loss"] - other["loss"]) / abs(one["loss"]) for one, other in zip(plain, chosen, strict=True)
    )
    if not apart <= KERNELS_BOUND:
        raise StepError(f"apart from plain torch's by more than {KERNELS_BOUND:.0e}: {losses_of(chosen)}")
    return f"{losses_of(chosen)}, within {apart:.1e} of plain torch's, {job.on_the_device(chosen[-1])}"


def count_cards(device: str) -> int:
    """Devices of this kind; on the CPU as many ranks as two of its cores allow."""
    import torch

    return 2 if device == "cpu" else torch.accelerator.device_count()


def hidden_from_ranks(device: str) -> dict[str, str]:
    """The environment in which torch sees no card, where the suite is of the CPU."""
    return os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
