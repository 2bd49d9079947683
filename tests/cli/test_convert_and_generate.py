"""megalite convert and megalite generate, as a user calls them."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megalite.checkpoint.manifest import Manifest, Shard, TensorEntry
from megalite.checkpoint.manifest_json import to_json
from megalite.cli import convert, generate
from megalite.config.sections.schema import OptimizerConfig
from megalite.errors import CheckpointError, ConfigError
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.axes import Layout
from megalite.topology.parameters import canonical_tensors, parameter_count
from megalite.topology.shape import ModelShape
from megalite.topology.stages import pipeline_split
from megalite.train.optimizer.settings import OptimizerSettings
from megalite.train.optimizer.torch import TorchOptimizer
from tests.support import reported_faults as faults
from tests.support.checkpoints import save_checkpoint
from tests.support.museum import exhibit
from tests.support.parity import ZERO_RTOL, assert_close
from tests.support.tiny import tiny_shape, tiny_tokenizer
from tests.support.waiting import PATIENCE
from tests.unit.convert.exporting import lively_stage, save_stage

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint and its tokenizer."""
    run = tmp_path_factory.mktemp("run")
    (run / "tokenizer").mkdir()
    tiny_tokenizer(run / "tokenizer")
    shape = replace(tiny_shape(layers=2), vocab_size=384)
    save_stage(run, shape, lively_stage(shape))
    return run


def test_inspect_tells_what_is_there_without_torch(run_folder: Path) -> None:
    said = inspected_without_torch(run_folder)
    for fact in (
        "step-000020: complete, each element is stored exactly once",
        "step 20, 160 sequences, 1,920 tokens",
        "written by tensor 1 x pipeline 1 x data 1, layers 0-1",
        "model.layers.1.self_attn.k_proj.weight 24 x 48 float32 1 shard",
    ):
        assert fact in said


def test_inspect_shows_a_hugging_face_folder_without_torch(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=76, num_hidden_layers=2, num_attention_heads=8
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path, max_shard_size="30KB")
    files = len(list(tmp_path.glob("*.safetensors")))
    said = inspected_without_torch(tmp_path)
    assert files > 2 and f" bytes in {files} files" in said
    assert "a Hugging Face folder, 21 tensors" in said and "model_type llama" in said
    assert "model.layers.1.mlp.up_proj.weight 76 x 48 BF16 model-0000" in said


def test_inspect_takes_a_second_for_thousands_of_tensors(tmp_path: Path) -> None:
    """Its files are as long as they are to be, and hold nothing."""
    shape = replace(tiny_shape(layers=300), vocab_size=128256, hidden_size=4096, intermediate_size=12288)
    files = [f"rank-{rank:05d}.safetensors" for rank in range(8)]

    def entry(kind: str, name: str, full: tuple[int, ...]) -> TensorEntry:
        total = prod(full)
        cuts = [total * rank // len(files) for rank in range(len(files) + 1)]
        shards = (
            Shard(file, f"{kind}/{name}@{low}", (0,) * len(full), full, (low, high), "0" * 64)
            for file, (low, high) in zip(files, pairwise(cuts), strict=True)
        )
        return TensorEntry(full, "float32", tuple(shards))

    tensors = {
        kind: {name: entry(kind, name, full) for name, full in canonical_tensors(shape).items()}
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    sizes = dict.fromkeys(files, 4 * parameter_count(shape))
    counters = {"step": 7, "samples": 70, "tokens": 700}
    manifest = Manifest("0", "2", counters, Layout(data=8), ((0,),), shape, {}, {"step": 7.0}, tensors, sizes)
    checkpoint = tmp_path / "step-000007"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text(to_json(manifest))
    for name, size_bytes in sizes.items():
        (checkpoint / name).touch()
        os.truncate(checkpoint / name, size_bytes)
    assert sum(map(len, tensors.values())) > 8000
    began = time.process_time()
    assert convert.run(["inspect", str(checkpoint), "--all"]) == 0
    assert time.process_time() - began < 3  # one, where others compute beside it


def inspected_without_torch(path: Path) -> str:
    """What `megalite convert inspect` says, with single spaces."""
    code = (
        "import sys; from megalite.cli.convert import run; run(['inspect', sys.argv[1]]);"
        " assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.split())


def test_inspect_refuses_what_is_broken(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run folder"):
        convert.run(["inspect", str(tmp_path)])


def test_export_then_generate_from_either(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "export"
    assert convert.run(["export", str(run_folder), str(output), "--shard-size", "100KB"]) == 0
    said = capsys.readouterr().out
    assert "step-000020" in said and "whole model, logits" in said and "weight file(s) of float32" in said
    assert len(list(output.glob("model-*.safetensors"))) > 2
    prompt = "the tensor waits"
    arguments = [str(run_folder / "checkpoints" / "step-000020"), "--prompt", prompt, "--tokens", "20"]
    assert generate.run([*arguments, "--tokenizer", str(output)]) == 0
    text = capsys.readouterr().out
    tokenizer, model = (kind.from_pretrained(output) for kind in (AutoTokenizer, AutoModelForCausalLM))
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=20, do_sample=False)[0]
    assert text == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def averaged_run(run: Path, shape: ModelShape) -> None:
    """A bf16 run after one step, with a moving average of the weights."""
    split, mesh = pipeline_split(shape.num_hidden_layers), ParallelMesh.single()
    replica = build_replica(shape, mesh, split, ModelOptions(dtype=torch.bfloat16), seed=3)
    settings = OptimizerSettings(
        OptimizerConfig(name="sgd", weight_decay=0.0, gradient_clipping=0.0, ema_decay=0.5)
    )
    optimizer = TorchOptimizer(replica, settings)
    for tensor in replica.stage.parameters():
        tensor.grad = torch.full_like(tensor, 1e-3, dtype=torch.float32)
    optimizer.step(1.0, float(optimizer.squared_norm()))
    save_checkpoint(
        run / "checkpoints",
        replica,
        optimizer.state,
        trainer_state={"step": 1, "samples": 8, "tokens": 96},
        config={},
    )


@exhibit(
    "torchtitan PR#4166",
    subject="folders",
    there="a run in bf16 was exported as float32 by name, with the digits of bf16",
    here="an export in float32 has the float32 masters",
    fault=faults.MASTERS_ARE_ROUNDED,
    costly=True,
)
def test_masters_and_the_moving_average_can_be_exported(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    averaged_run(tmp_path, replace(tiny_shape(layers=2), vocab_size=384))
    exported = {}
    for kind in ("weight", "master", "ema"):
        output = tmp_path / kind
        assert convert.run(["export", str(tmp_path), str(output), "--weights", kind]) == 0
        exported[kind] = load_file(output / "model.safetensors")
    assert any(not torch.equal(exported["weight"][name], each) for name, each in exported["master"].items())
    for name, master in exported["master"].items():
        assert torch.equal(exported["weight"][name], master.bfloat16().float()), name
        # The average is half-way between the master after the only step and before it.
        assert_close(exported["ema"][name], master + 0.5e-3, rtol=ZERO_RTOL, what=name)
    assert "float32, from the checkpoint's ema" in (tmp_path / "ema" / "README.md").read_text()
    assert "float32, widened from bfloat16" in (tmp_path / "weight" / "README.md").read_text()
    for dtype, expected in (("float32", exported["master"]), ("bfloat16", exported["weight"])):
        assert convert.run(["export", str(tmp_path), str(tmp_path / dtype), "--dtype", dtype]) == 0
        assert f"weight file(s) of {dtype}, from the checkpoint's master" in capsys.readouterr().out
        assert f"{dtype}, from the checkpoint's master" in (tmp_path / dtype / "README.md").read_text()
        written = load_file(tmp_path / dtype / "model.safetensors")
        assert all(torch.equal(written[name].float(), values) for name, values in expected.items())
    with pytest.raises(CheckpointError, match="step-000020 has no ema; it has weight"):
        convert.run(["export", str(run_folder), str(tmp_path / "none"), "--weights", "ema"])


@pytest.mark.parametrize("command", ["export", "generate"])
def test_damage_is_told_without_the_settings_of_a_run(run_folder: Path, tmp_path: Path, command: str) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "step-000020" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    words = {"export": [str(tmp_path / "export")], "generate": ["--prompt", "a", "--tokens", "2"]}[command]
    with pytest.raises(CheckpointError, match=r"sha256 differs.*; use another checkpoint") as refused:
        main = {"export": convert.run, "generate": generate.run}[command]
        main([*(["export"] if command == "export" else []), str(tmp_path / "run"), *words])
    assert "checkpoint.resume" not in str(refused.value)


@pytest.fixture(scope="module")
def hugging_face(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "model"
    assert convert.run(["export", str(run_folder), str(folder)]) == 0
    return folder


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_an_import_on_a_full_disk_advises_what_it_has_and_leaves_nothing(
    hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    else:

        def full(*given: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("megalite.convert.foreign.streamed.write_tensor_file", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device.*; free space there or name a RUN"
    ) as told:
        convert.run(["import", str(hugging_face), str(tmp_path / "new" / "run")])
    assert "keep_last" not in str(told.value) and list(tmp_path.iterdir()) == []


def test_an_import_says_what_a_run_does_otherwise(
    hugging_face: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    description = json.loads((hugging_face / "config.json").read_text())
    description |= {"eos_token_id": 0, "pad_token_id": 0, "unheard_of": 1}
    (tmp_path / "config.json").write_text(json.dumps(description))
    run = ["import", str(hugging_face), str(tmp_path / "run"), "--hf-config", str(tmp_path / "config.json")]
    assert convert.run(run) == 0
    said = capsys.readouterr().out
    assert "has pad_token_id = 0, an end of text too" in said and "nor this run: unheard_of" in said


def test_what_was_in_the_run_folder_stays_there(
    hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match="No space left"):
        convert.run(["import", str(hugging_face), str(tmp_path)])
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]


def test_generate_finds_the_tokenizer_of_the_run(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert generate.run([str(run_folder), "--prompt", "one rank", "--tokens", "3"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("one rank") and "3 tokens in" in said.err


def test_checkpoints_on_another_disk_belong_to_the_run_that_links_to_them(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "disk")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000020"
    # A link to a checkpoint leads to its run too.
    (tmp_path / "mine").symlink_to(run_folder / "checkpoints" / "step-000020")
    for named in (tmp_path / "run", checkpoint, tmp_path / "mine"):
        assert generate.run([str(named), "--prompt", "one rank", "--tokens", "1"]) == 0
        assert capsys.readouterr().out.startswith("one rank")
    with pytest.raises(CheckpointError, match="no tokenizer was found"):
        generate.run([str(tmp_path / "disk" / "step-000020"), "--prompt", "one rank"])


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shape = tiny_shape(layers=1)
    checkpoint = save_stage(tmp_path, shape, lively_stage(shape))
    with pytest.raises(CheckpointError, match=r"no tokenizer was found for .*--tokenizer"):
        generate.run([str(checkpoint), "--prompt", "x"])
    assert convert.run(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "no tokenizer was found" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("size", ["5XB", "-1", "0", ""])
def test_a_wrong_size_is_refused(size: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        convert.run(["export", "a", "b", "--shard-size", size])
    assert caught.value.code == 2
    assert "is not a size" in capsys.readouterr().err or size == "-1"


def test_the_real_pretrained_model_writes_its_sentence(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert convert.run(["import", str(shared_data / "stories260K"), str(tmp_path / "stories")]) == 0
    assert "260,032 parameters of a llama" in capsys.readouterr().out
    told = [str(tmp_path / "stories"), "--prompt", "Once upon a time", "--tokens", "60"]
    assert generate.run(told) == 0
    assert capsys.readouterr().out.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
        "One day, she saw a big, red ball."
    )


def test_a_folder_that_cannot_be_expressed_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_act": "gelu", "hidden_size": 8}')
    with pytest.raises(ConfigError, match='hidden_act = "gelu"; only "silu" is supported'):
        convert.run(["import", str(tmp_path), str(tmp_path / "out")])
    (tmp_path / "config.json").write_text('{"model_type": "llama", "intermediate_size": "many"}')
    with pytest.raises(ConfigError, match="intermediate_size: input should be a valid integer"):
        convert.run(["import", str(tmp_path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
