"""Find torch.distributed.checkpoint folders. No torch.

.metadata             names, shapes, chunks, and where each chunk is
__0_0.distcp ...      the chunks, one file or more for each rank

Accelerate writes pytorch_model_fsdp_0 and optimizer_0, both such folders; torchtitan step-N folders.
"""

import re
from pathlib import Path

METADATA = ".metadata"
_ACCELERATE = re.compile(r"pytorch_model_fsdp(_\d+)?")
_STEP = re.compile(r"(?:step|checkpoint)[-_](\d{1,15})", re.ASCII)


def is_dcp_folder(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this folder, and not another program a Hugging Face one."""
    if not (folder / METADATA).is_file():
        return False
    of_hugging_face = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return not of_hugging_face or any(folder.glob("*.distcp"))


def find_dcp(folder: Path) -> Path | None:
    """Return the folder of the model: `folder`, its pytorch_model_fsdp_0, or its latest step; None for another kind.

    Raises nothing: a folder with megatron-core's metadata.json is megatron-core's, even though it has a .metadata.
    """
    if is_dcp_folder(folder):
        return None if (folder / "metadata.json").is_file() else folder
    try:
        inside = [path for path in folder.iterdir() if is_dcp_folder(path)]
    except OSError:
        return None
    models = sorted(path for path in inside if _ACCELERATE.fullmatch(path.name))
    if models:
        return models[0]
    steps = {int(match[1]): path for path in inside if (match := _STEP.fullmatch(path.name))}
    return find_dcp(steps[max(steps)]) if steps else None


def optimizer_folder(model: Path) -> Path | None:
    """Return Accelerate's folder of the optimizer beside that of the model; None for a folder with both."""
    match = _ACCELERATE.fullmatch(model.resolve().name)
    beside = model.resolve().parent / f"optimizer{match[1] or ''}" if match else None
    return beside if beside is not None and is_dcp_folder(beside) else None
