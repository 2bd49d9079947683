"""The frozen weights beside an adapter: which they are, and whether a folder still holds them. No torch."""

import hashlib
import json
from pathlib import Path

from megalite.checkpoint.durable import write_durably
from megalite.checkpoint.manifest import Base
from megalite.checkpoint.strict_json import parse
from megalite.config.sources.hub import HubName
from megalite.config.sources.peft import ADAPTER_CONFIG
from megalite.convert.huggingface.files import local_folder, weight_files
from megalite.errors import CheckpointError

# Enough samples that weights of another training differ in one, few enough to be read at once.
_SAMPLES, _SAMPLE_BYTES = 256, 4096
# Beside PEFT's files: they name the base, and this one tells it from other weights.
_FILE = "megalite_base.json"


def base_of(weights: str) -> Base:
    """Describe a Hugging Face folder, or org/name@commit of the Hub, as the base of an adapter.

    Raises CheckpointError if it has no weights.
    """
    named = weights if HubName.of(weights) else str(Path(weights).expanduser().resolve())
    return Base(named, _fingerprint(local_folder(weights)))


def folder_of_base(base: Base | None, moved_to: Path | None = None) -> Path:
    """Return the folder of the base's weights; moved_to: where the user says that they are now.

    Raises CheckpointError if there is none, or if it holds other weights.
    """
    if base is None:
        raise CheckpointError(
            "the adapter does not say which weights it belongs to; name them with --base FOLDER"
        )
    try:
        folder = local_folder(base.weights) if moved_to is None else moved_to
        fingerprint = _fingerprint(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the weights that the adapter belongs to: {error}; name their folder with --base FOLDER"
        ) from error
    if fingerprint != base.fingerprint:
        raise CheckpointError(
            f"{folder} does not hold the weights that the adapter was trained with ({base.weights} then); name their"
            " folder with --base FOLDER"
        )
    return folder


def write_base(base: Base, folder: Path) -> None:
    """Write beside PEFT's files which weights the adapter belongs to."""
    write_durably(folder / _FILE, json.dumps(vars(base), indent=2) + "\n")


def stated_base(folder: Path) -> Base | None:
    """Return the base that megalite wrote beside PEFT's files; None: PEFT alone wrote them. Raises CheckpointError."""
    if not (folder / _FILE).is_file():
        return None
    try:
        content = parse((folder / _FILE).read_text(encoding="utf-8"))
        return Base(str(content["weights"]), str(content["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / _FILE} is damaged ({error}); delete it") from error


def base_of_adapter(folder: Path, moved_to: Path | None = None) -> Path:
    """Return the folder of the weights that an adapter in PEFT's format belongs to, as `folder_of_base` does."""
    if (base := stated_base(folder)) is not None:
        return folder_of_base(base, moved_to)
    if moved_to is not None:
        return moved_to
    try:
        named = parse((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        folder_of_weights = local_folder(named)
        weight_files(folder_of_weights)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG} names no weights that can be read ({error}); name their folder"
            " with --base FOLDER"
        ) from error
    return folder_of_weights


def require_base(base: Base | None, weights: Base, checkpoint: Path) -> None:
    """Raise CheckpointError unless a checkpoint's adapter belongs to these weights."""
    if base is not None and base.fingerprint != weights.fingerprint:
        raise CheckpointError(
            f"{checkpoint} is of an adapter of other weights ({base.weights}) than model.weights ({weights.weights});"
            " set model.weights to those"
        )


def _fingerprint(folder: Path) -> str:
    """Return a hash of the names and sizes of a folder's weight files and of samples of their bytes."""
    digest = hashlib.sha256()
    for name in weight_files(folder):
        try:
            size = (folder / name).stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with (folder / name).open("rb") as opened:
                for sample in range(_SAMPLES):
                    opened.seek(size * sample // _SAMPLES)
                    digest.update(opened.read(_SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read ({error})") from error
    return digest.hexdigest()
