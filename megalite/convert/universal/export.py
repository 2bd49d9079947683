"""Export a checkpoint as a DeepSpeed universal checkpoint: weights and AdamW's moments, under Hugging Face's names.

`engine.load_checkpoint` loads the folder with `checkpoint.load_universal` under ZeRO 1, 2 and 3, on any number of
data-parallel ranks.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.coverage import check_coverage
from megalite.checkpoint.durable import write_durably
from megalite.checkpoint.manifest import WEIGHT, Manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.convert.exported_folder import exported_folder
from megalite.convert.huggingface.export import read_family_tensor
from megalite.convert.huggingface.origin import Origin, find_origin
from megalite.convert.universal.folder import (
    LATEST_UNIVERSAL,
    MODEL_STATES,
    MOMENTS,
    OPTIMIZER_STATE,
    STATE_FILES,
    STEP,
    ZERO,
)
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES, hf_config, model_tensors
from megalite.topology.parameters import canonical_tensors
from megalite.topology.state import EMA, MASTER

_CARD = "README.md"
_MARK = "<!-- DeepSpeed universal checkpoint, written by megalite -->"
# The DeepSpeed version whose file format is written.
_DEEPSPEED = "0.19.8"
# DeepSpeed copies hyperparameters group by group from the file; this many empty groups make it copy none.
_MOST_GROUPS = 1024


def export_universal(checkpoint: Path, destination: Path) -> Manifest:
    """Write a checkpoint of any layout as a universal one, in one process with one tensor in memory at a time.

    Weights are fp32: the master weights of a bf16 or fp16 run. Hyperparameters are not written: the loading engine
    keeps its own. The folder appears when it is complete; an earlier export of megalite is replaced. Returns the
    checkpoint's manifest. Raises CheckpointError if the checkpoint is damaged or lacks AdamW's state, or if
    `destination` has other content.
    """
    exact = _fp32_weights_key(checkpoint)
    with (
        exported_folder(destination, "a DeepSpeed universal checkpoint", _is_ours) as partial,
        CheckpointReader(checkpoint, weights=exact) as reader,
    ):
        manifest = reader.manifest
        check_coverage(manifest, checkpoint)
        tag = f"global_step{manifest.step}_universal"
        zero = partial / tag / ZERO
        zero.mkdir(parents=True)
        _write_tensors(reader, zero)
        _save(_optimizer_state(manifest), zero / OPTIMIZER_STATE)
        for name in MODEL_STATES:
            _save(_model_states(manifest), partial / tag / name)
        ours, settings = hf_config(manifest.model, "float32", {}), manifest.config.get("model") or {}
        config = Origin(find_origin(checkpoint)).config_with(ours, {}, settings)
        write_durably(partial / "config.json", json.dumps(config, indent=2) + "\n")
        write_durably(partial / LATEST_UNIVERSAL, tag)
        write_durably(partial / _CARD, _card(manifest))
    return manifest


def _fp32_weights_key(checkpoint: Path) -> str:
    """Return the state key of the unrounded weights. Raises CheckpointError if AdamW's state is missing."""
    with CheckpointReader(checkpoint) as reader:
        if reader.manifest.model.adapter is not None:
            raise CheckpointError(
                f"{checkpoint} holds an adapter, not the weights of a model; megalite convert export writes the merged"
                " model, and with --adapter the adapter"
            )
        tensors, scalars = reader.manifest.tensors, reader.manifest.optimizer
        stored = reader.manifest.optimizer_state_keys
    # Muon's checkpoints have the moments of some tensors; another optimizer's may have more state than AdamW's.
    complete = all(tensors.get(key, {}).keys() == tensors[WEIGHT].keys() for key in MOMENTS)
    if not complete or stored - {*MOMENTS, MASTER, EMA} or "step" not in scalars:
        raise CheckpointError(
            f"{checkpoint} has {', '.join(sorted(stored)) or 'no optimizer state'}, but a universal checkpoint needs"
            f" AdamW's {' and '.join(MOMENTS)}; for the weights alone use megalite convert export"
        )
    return reader.manifest.exact_weights


def _write_tensors(reader: CheckpointReader, zero: Path) -> None:
    step, shapes = _step(reader.manifest), canonical_tensors(reader.manifest.model)
    # DeepSpeed looks for the parameters of the model in memory.
    in_models = FAMILIES[reader.manifest.model.family].names.in_models
    for tensor in model_tensors(reader.manifest.model):
        folder = zero / in_models.get(tensor.name, tensor.name)
        folder.mkdir()
        for name, state_key in zip(STATE_FILES, (WEIGHT, *MOMENTS), strict=True):
            values = read_family_tensor(reader, state_key, tensor, shapes).float()
            if values.untyped_storage().nbytes() > values.nbytes:
                values = values.clone()  # torch.save writes the whole storage
            _save({"param": values}, folder / f"{name}.pt")
        _save(step, folder / STEP)


def _step(manifest: Manifest) -> torch.Tensor:
    """Return the step as a tensor, as torch's AdamW keeps it; DeepSpeed's optimizers accept that too."""
    return torch.tensor(float(manifest.optimizer["step"]))


def _optimizer_state(manifest: Manifest) -> dict[str, Any]:
    groups: list[dict[str, Any]] = [{} for _ in range(_MOST_GROUPS)]
    # ZeRO 3 shares this object between its sub-groups; all of them would increment the same tensor, so it is an int.
    third = {"state": {0: {"step": int(_step(manifest))}}, "param_groups": [{}]}
    return {"ds_version": _DEEPSPEED, "param_groups": groups, "optimizer_state_dict": third}


def _model_states(manifest: Manifest) -> dict[str, Any]:
    state = manifest.trainer_state
    skipped = state.get("skipped_steps", 0)
    return {
        "module": {},
        "global_steps": manifest.step,
        "global_samples": state.get("samples", 0),
        "skipped_steps": skipped,
        # DeepSpeed's schedules count the last update made, starting from 0.
        "lr_scheduler": {"last_batch_iteration": manifest.step - skipped - 1},
        "dp_world_size": manifest.layout.data,
        "mp_world_size": 1,
        "ds_version": _DEEPSPEED,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }


def _save(content: object, path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch raises this for a full disk
            raise OSError(f"{path.name}: {error}") from error
        file.flush()
        os.fsync(file.fileno())


def _is_ours(folder: Path) -> bool:
    card = folder / _CARD
    return card.is_file() and _MARK in card.read_text(encoding="utf-8", errors="replace")


def _card(manifest: Manifest) -> str:
    last = _model_states(manifest)["lr_scheduler"]["last_batch_iteration"]
    settings = "\n".join(f"    {line}" for line in _settings(manifest))
    return f"""{_MARK}
# Step {manifest.step:,} of a {manifest.model.family} model, for DeepSpeed

```python
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))
config["checkpoint"] = {{"load_universal": True}}  # and ZeRO 1, 2 or 3, any number of data-parallel ranks
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.load_checkpoint(FOLDER)
```

Weights and AdamW's moments are fp32, after {manifest.optimizer["step"]:g} updates. Learning rate, betas, eps, weight
decay and parameter groups come from your `config` or optimizer. The run was trained with

{settings}

Under ZeRO 3 DeepSpeed sets `step` in each `state` of `engine.optimizer.optimizer.state.values()` to a number, which its
own Adam expects. For torch's AdamW convert each: `state["step"] = torch.tensor(float(state["step"]))`.

A DeepSpeed learning-rate schedule continues after `engine.lr_scheduler.step({last})`. For a torch schedule, load with
`load_lr_scheduler_states=False` and set its position yourself. `global_samples` counts the
sequences that were seen; which ones they were is not stored.
"""


def _settings(manifest: Manifest) -> Iterator[str]:
    """Yield the optimizer settings in the run's configuration, and the number of sequences and tokens."""
    optimizer = manifest.config.get("optimizer") or {}
    for name in ("learning_rate", "betas", "eps", "weight_decay", "gradient_clipping", "groups"):
        if optimizer.get(name) is not None:
            yield f"optimizer.{name} = {optimizer[name]}"
    yield f"{manifest.trainer_state.get('samples', 0):,} sequences, {manifest.trainer_state.get('tokens', 0):,} tokens"
