"""Low-rank adapters with random values beside a Hugging Face folder: PEFT's folders and checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from megalite.config.peft_names import peft_names
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.peft.base import base_of
from megalite.model.options import ModelOptions
from megalite.model.stages import build_replica
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.adapter import Lora
from megalite.topology.parameters import trained_tensors
from megalite.topology.stages import pipeline_split
from tests.support.checkpoints import NoOptimizer, save_checkpoint


def peft_folder(folder: Path, base: Path, lora: Lora, *, seed: int = 0, spread: float = 0.3) -> Path:
    """Write an adapter of `base` as PEFT does, in float64 with values of this spread; return `folder`."""
    generator = torch.Generator().manual_seed(seed)
    shape = replace(shape_of_folder(str(base)), adapter=lora)
    names = peft_names(shape)
    tensors = {
        names[name]: spread * torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in trained_tensors(shape).items()
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "modules_to_save": list(lora.modules_to_save) or None,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": lora.bias,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def adapter_run(run: Path, base: Path, lora: Lora, *, seed: int = 0, spread: float = 0.3) -> Path:
    """Write a run folder with one checkpoint of an adapter of `base`, in float64; return `run`."""
    shape = replace(shape_of_folder(str(base)), adapter=lora)
    options, split = ModelOptions(dtype=torch.float64), pipeline_split(shape.num_hidden_layers)
    replica = build_replica(shape, ParallelMesh.single(), split, options, seed=None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in replica.trained_tensors.values():
            tensor.copy_(spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    save_checkpoint(
        run / "checkpoints",
        replica,
        NoOptimizer(),
        trainer_state={"step": 1, "samples": 1, "tokens": 1},
        config={},
        base=base_of(str(base)),
    )
    return run
