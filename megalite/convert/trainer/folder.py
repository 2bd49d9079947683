"""Find checkpoint folders of Hugging Face's Trainer, which axolotl, LLaMA-Factory and TRL use too. No torch.

checkpoint-N/config.json, model.safetensors      the weights, as a Hugging Face folder
             optimizer.pt                        state_dict of the optimizer; optimizer.bin: of FSDP, by name
             trainer_state.json                  global_step, train_batch_size, num_input_tokens_seen
             rng_state.pth, or rng_state_R.pth   one for each process
             training_args.bin, scheduler.pt, scaler.pt
"""

import json
import re
from pathlib import Path

from megalite.convert.foreign.places import latest_step

STATE = "trainer_state.json"
CONFIG = "config.json"
ARGUMENTS = "training_args.bin"
SCALER = "scaler.pt"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_ADAPTER = "adapter_config.json"
_RANDOM_STATES = re.compile(r"rng_state(_\d+)?\.pth", re.ASCII)


def find_trainer(folder: Path) -> Path | None:
    """Return the folder of one step: `folder`, or its latest checkpoint-N if it has no model itself; None for others.

    A folder with neither an optimizer's file nor an adapter is one of Hugging Face weights.
    """
    if (folder / STATE).is_file():
        whole = (folder / CONFIG).is_file() and optimizer_file(folder) is not None
        return folder if whole or is_adapter(folder) else None
    if (folder / CONFIG).is_file():
        return None
    latest = latest_step(folder)
    return None if latest is None else find_trainer(latest)


def step_without_optimizer(folder: Path) -> int | None:
    """Return the step of a Trainer's folder without an optimizer's file; None for another one, or at step 0."""
    if optimizer_file(folder) is not None:
        return None
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the weights can be read without it
    step = content.get("global_step") if isinstance(content, dict) else None
    return step if isinstance(step, int) and step > 0 else None


def find_arguments(folder: Path) -> Path | None:
    """Return the latest checkpoint-N in the folder, or the folder itself, if it has a training_args.bin."""
    places = (latest_step(folder), folder)
    return next((place for place in places if place is not None and (place / ARGUMENTS).is_file()), None)


def is_adapter(folder: Path) -> bool:
    """Whether the folder has an adapter of PEFT instead of a whole model."""
    return (folder / _ADAPTER).is_file()


def optimizer_file(folder: Path) -> Path | None:
    """Return the file of the optimizer's state; None if there is none."""
    return next((folder / name for name in _OPTIMIZERS if (folder / name).is_file()), None)


def process_count(folder: Path) -> int:
    """Return how many processes have left their random state; 0 if none has."""
    return sum(_RANDOM_STATES.fullmatch(path.name) is not None for path in folder.iterdir())
