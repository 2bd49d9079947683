"""A checkpoint as a DeepSpeed universal one: weights and AdamW's moments, under the names of Hugging Face's models.

The folder is what `engine.load_checkpoint` takes with `checkpoint.load_universal` under ZeRO 1, 2 and 3, on any number
of data-parallel ranks.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.folder import write_durably
from megalite.checkpoint.format import WEIGHT, Manifest, check_coverage
from megalite.checkpoint.tensor_file import CheckpointReader
from megalite.convert.exported_folder import exported_folder
from megalite.convert.huggingface.export import read_family_tensor
from megalite.convert.universal.folder import (
    KINDS,
    LATEST_UNIVERSAL,
    MODEL_STATES,
    MOMENTS,
    OPTIMIZER_STATE,
    STEP,
    ZERO,
)
from megalite.errors import CheckpointError
from megalite.families.registry import family_tensors, hf_config
from megalite.topology.state import MASTER

_CARD = "README.md"
_MARK = "<!-- DeepSpeed universal checkpoint, written by megalite -->"
# The version whose files these are.
_DEEPSPEED = "0.19.8"
# It takes over hyperparameters group by group, as far as there are groups in the file: none of any number of groups.
_MOST_GROUPS = 1024


def export_universal(checkpoint: Path, destination: Path) -> Manifest:
    """Write a checkpoint of any layout as a universal one; one process, one tensor in memory at a time.

    What is written as float32 are the masters of a 16-bit run. Hyperparameters are not: those of the engine that
    loads it stay. The folder appears only when it is whole; an earlier one of ours is replaced. Raises
    CheckpointError when the checkpoint is damaged, has not AdamW's state, or `destination` holds something else.
    """
    exact = _weights_kind(checkpoint)
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
        config = hf_config(manifest.model, "float32", {})
        write_durably(partial / "config.json", json.dumps(config, indent=2) + "\n")
        write_durably(partial / LATEST_UNIVERSAL, tag)
        write_durably(partial / _CARD, _card(manifest))
    return manifest


def _weights_kind(checkpoint: Path) -> str:
    """The kind with all the digits of the weights; raises CheckpointError where AdamW's state is not there."""
    with CheckpointReader(checkpoint) as reader:
        kinds, scalars = reader.manifest.optimizer_kinds, reader.manifest.optimizer
    if not kinds.issuperset(MOMENTS) or "step" not in scalars:
        raise CheckpointError(
            f"{checkpoint} has {', '.join(sorted(kinds)) or 'no optimizer state'}, and a universal checkpoint is made"
            f" of AdamW's {' and '.join(MOMENTS)}; for the weights alone use megalite convert export"
        )
    return MASTER if MASTER in kinds else WEIGHT


def _write_tensors(reader: CheckpointReader, zero: Path) -> None:
    step = _step(reader.manifest)
    for tensor in family_tensors(reader.manifest.model):
        folder = zero / tensor.name
        folder.mkdir()
        for kind, ours in zip(KINDS, (WEIGHT, *MOMENTS), strict=True):
            values = read_family_tensor(reader, ours, tensor).float()
            if values.untyped_storage().nbytes() > values.nbytes:
                values = values.clone()  # else all of the storage would be saved
            _save({"param": values}, folder / f"{kind}.pt")
        _save(step, folder / STEP)


def _step(manifest: Manifest) -> torch.Tensor:
    """As torch's AdamW counts; DeepSpeed's own take it too."""
    return torch.tensor(float(manifest.optimizer["step"]))


def _optimizer_state(manifest: Manifest) -> dict[str, Any]:
    groups: list[dict[str, Any]] = [{} for _ in range(_MOST_GROUPS)]
    # ZeRO 3 looks for the step here and gives this very object to each of its sub-groups, which would all add to a
    # tensor.
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
        # As DeepSpeed's own schedules count: the last of the updates made.
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
        except RuntimeError as error:  # what torch makes of a disk that is full
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

Weights and AdamW's moments are float32; it made {manifest.optimizer["step"]:g} updates. Learning rate, betas, eps,
weight decay and their groups are those of your `config` or optimizer. The run had

{settings}

Under ZeRO 3 each `state` of `engine.optimizer.optimizer.state.values()` gets its `step` as a number, as DeepSpeed's own
Adam counts. torch's AdamW wants tensors there: `state["step"] = torch.tensor(float(state["step"]))` for each.

One of DeepSpeed's own schedules goes on with `engine.lr_scheduler.step({last})` after the loading; one of torch's has
to be told by you, with `load_lr_scheduler_states=False`. The data begins where your loader does.
"""


def _settings(manifest: Manifest) -> Iterator[str]:
    """What the run was trained with, as far as its configuration says."""
    optimizer = manifest.config.get("optimizer") or {}
    for name in ("learning_rate", "betas", "eps", "weight_decay", "gradient_clipping", "groups"):
        if optimizer.get(name) is not None:
            yield f"optimizer.{name} = {optimizer[name]}"
    yield f"{manifest.trainer_state.get('samples', 0):,} sequences, {manifest.trainer_state.get('tokens', 0):,} tokens"
