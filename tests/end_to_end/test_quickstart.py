"""The quickstart's files, with fewer steps: train on 8 ranks, export, load with transformers, generate."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megalite.checkpoint.folder import find_best
from tests.support.jobs import ROOT, curve

RUN_FILE = ROOT / "examples" / "quickstart" / "run.toml"


def _megalite(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "megalite", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    # Two small packages of the standard library instead of all of it.
    library = Path(subprocess.__file__).parent
    sources = f'["{library / "json"}", "{library / "email"}"]'
    flags = ["--run.folder", str(folder), "--training.steps", "20", "--data.source", sources]
    flags += ["--data.pattern", "*.py", "--tokenizer.vocab_size", "1024", "--checkpoint.every", "10"]
    flags += ["--optimizer.warmup_steps", "4", "--validation.every", "10", "--data.split", "[0.8, 0.2]"]
    return folder, _megalite("train", str(RUN_FILE), *flags)


def test_it_learns_and_says_where_things_lie(finished):
    folder, output = finished
    losses = [record[1] for record in curve(folder)]
    assert len(losses) == 20
    assert sum(losses[-5:]) / 5 < losses[0] - 0.8
    for name in ("checkpoint", "metrics", "export"):
        assert name in output.splitlines()[-1] or f"  {name}" in output
    validated = [
        line for line in (folder / "metrics.jsonl").read_text().splitlines() if "validation_loss" in line
    ]
    assert len(validated) == 2 and find_best(folder / "checkpoints") is not None
    assert " first, " in output and " last, " in output and "tokens/s" in output
    # Rank 0 alone speaks: 8 ranks say it once.
    assert output.count("done: 20 steps") == 1
    assert "WARNING" not in output, "of DeepSpeed, such as that on an optimizer whose class it does not know"


def test_transformers_loads_the_export_and_writes_what_megalite_writes(finished):
    folder, _ = finished
    model = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    prompt = "def encode(self, "
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    ours = _megalite("generate", str(folder), "--prompt", prompt, "--tokens", "12")
    assert ours.rstrip("\n") == tokenizer.decode(theirs[0], skip_special_tokens=True).rstrip("\n")
