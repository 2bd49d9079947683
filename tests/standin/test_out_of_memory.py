"""An accelerator without memory ends a job with one message: what is kept there, what lowers it, what is saved."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalite.errors import MemoryExhausted
from megalite.monitor.memory import ExhaustedCard, exhausted_memory_explained
from tests.support.jobs import ROOT, Job
from tests.support.ranks import RankPool
from tests.support.standin import build, use_standin
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.unit.convert.exporting import lively_stage, save_stage

MEGABYTE = 1 << 20


def explained(card: ExhaustedCard | None) -> list[str]:
    assert card is not None
    return [f"asked for {card.asked} of {card.total} bytes"]


def allocate_too_much() -> str:
    """Return the message of a device of 8 MiB on which 16 do not fit, and leave the device as it was."""
    device, compiled = torch.device("standin", 0), use_standin()
    compiled.set_memory_limit(8 * MEGABYTE)
    try:
        with exhausted_memory_explained(device, explained):
            kept = torch.empty(2 * MEGABYTE, dtype=torch.uint8, device=device)
            torch.empty(16 * MEGABYTE, dtype=torch.uint8, device=device)
            del kept
    except MemoryExhausted as error:
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        return str(error)
    finally:
        compiled.set_memory_limit(0)
    return ""


@pytest.mark.extended
def test_the_device_is_named_with_what_it_has_and_what_was_asked(devices: RankPool) -> None:
    [message] = devices.run(allocate_too_much)
    first, card, last = message.splitlines()
    assert first == "out of memory on stand-in (standin:0): 16.00 MiB more do not fit"
    assert card.startswith("  the card has 8 MiB, of which ") and " torch used up to " in card
    assert last == f"  asked for 16.00 MiB of {8 * MEGABYTE} bytes"


def ended(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Return a command that has failed on the stand-in."""
    build.load()
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.standin", *arguments],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    return ran


@pytest.mark.extended
@pytest.mark.parametrize("data", [1, 2])
def test_a_run_says_what_it_keeps_and_how_to_go_on(tmp_path: Path, data: int) -> None:
    job = Job.write(tmp_path, tensor=1, pipeline=1, data=data)
    text = job.run_file.read_text().replace("[deepspeed.zero_optimization]\nstage = 1\n", "")
    job.run_file.write_text(text.replace("every = 3", "every = 1"))
    folder, rank = tmp_path / "run", data - 1
    ran = ended(*job.arguments(folder), FULL_AFTER=f"1:{rank}")
    said = ran.stderr.splitlines()
    start = next(number for number, line in enumerate(said) if "error: " in line)
    lines = [line.strip() for line in said[start:]]
    assert sum("out of memory" in line for line in lines) == 1
    assert f"out of memory on stand-in (standin:{rank}): " in lines[0] and lines[0].endswith(
        " more do not fit"
    )
    assert lines[1].startswith("the card has ")
    assert lines[2].startswith("after step 1: ")
    assert lines[3].startswith("this rank needs by estimate: ") and " adamw " in lines[3]
    advice = {line.split(":")[0]: line for line in lines[4:6]}
    assert "--training.recompute full" in advice["for activations and logits"]
    remedies = advice["for weights, gradients and optimizer state"]
    assert ("--deepspeed.zero_optimization.stage 1" in remedies) == (data > 1)
    # The checkpoint of step 1 may still be on its way.
    assert "resumes from it" in lines[6] or "starts from the beginning" in lines[6]
    report = json.loads((folder / "failures" / f"rank-{rank:05d}.json").read_text())
    assert report["rank"] == rank and report["exception"] == "MemoryExhausted"
    assert "torch.OutOfMemoryError" in report["traceback"] and "train_step" in report["traceback"]
    if data > 1:
        assert lines[0].startswith("error: rank 1 (") and lines[-1] == "1 other rank stopped because of it"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    (run / "tokenizer").mkdir()
    tiny_tokenizer(run / "tokenizer")
    shape = replace(tiny_shape(layers=1), vocab_size=384)
    save_stage(run, shape, lively_stage(shape))
    return run


@pytest.mark.extended
@pytest.mark.parametrize("tensor", ["1", "2"])
def test_generation_says_what_it_keeps(run_folder: Path, tensor: str) -> None:
    flags = ("--prompt", "one rank", "--tokens", "8", "--dtype", "float32", "--tensor", tensor)
    lines = ended("generate", str(run_folder), *flags, DEVICE_BYTES="100000").stderr.splitlines()
    start = next(number for number, line in enumerate(lines) if "error: " in line)
    # The other rank may fail alike, which a line says.
    assert sum("error: " in line for line in lines) == 1
    assert "out of memory on stand-in (standin:" in lines[start]
    assert lines[start + 1].startswith("  the card has 98 KiB")
    assert lines[start + 2].startswith("  this rank needs by estimate: weights ")
    assert " in float32, keys and values of 1 x " in lines[start + 2]
    assert "--dtype bfloat16, or an int8 export" in lines[start + 3]


@pytest.mark.extended
def test_evaluation_and_the_server_say_it_too(run_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one rank waits for the others\n" * 50)
    evaluated = ended("evaluate", str(run_folder), "--data", str(text), DEVICE_BYTES="200000").stderr
    assert "out of memory on stand-in (standin:0)" in evaluated and "--batch-size 4" in evaluated
    served = ended("serve", str(run_folder), "--port", "0", DEVICE_BYTES="200000").stderr
    assert "out of memory on stand-in (standin:0)" in served and "--max-requests 8" in served
