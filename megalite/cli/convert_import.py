"""megalite convert import: write a Hugging Face, Megatron-LM or DeepSpeed universal checkpoint as a megalite one."""

import argparse
import json
from pathlib import Path

from megalite.checkpoint.folder import find_latest, require_whole
from megalite.checkpoint.manifest import MANIFEST
from megalite.cli.arguments import add_value
from megalite.config.sources.hub import HubName
from megalite.config.sources.huggingface import notes_of, shape_of_folder
from megalite.convert.huggingface.files import local_folder
from megalite.convert.megatron.folder import is_megatron_folder
from megalite.convert.universal.folder import LATEST_UNIVERSAL, ZERO, find_config, find_universal
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES
from megalite.monitor.work import working
from megalite.topology.parameters import parameter_count


def add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `import` to the commands of `megalite convert`."""
    importing = commands.add_parser(
        "import",
        help="write a Hugging Face, Megatron-LM or DeepSpeed universal checkpoint as a megalite checkpoint",
    )
    importing.add_argument(
        "folder",
        metavar="FOLDER",
        help="Hugging Face folder with config.json and safetensors files, or org/name[@revision] on its Hub; folder"
        " with mp_rank_* folders (Megatron-LM, --ckpt-format torch); DeepSpeed universal folder",
    )
    importing.add_argument("output", type=Path, metavar="RUN", help="run folder to write")
    about = "config.json of the model, or its folder; needed if a universal folder has none"
    add_value(importing, "--hf-config", Path, "PATH", about)
    about = "vocabulary size, if a Megatron-LM checkpoint does not record the size before padding"
    add_value(importing, "--vocab-size", int, "TOKENS", about)
    importing.set_defaults(command=run_import)


def run_import(options: argparse.Namespace) -> int:
    """Run `megalite convert import`; the folder's files decide its format. Raises CheckpointError, ConfigError."""
    folder = Path(options.folder).expanduser()
    if HubName.of(options.folder) is None and not folder.is_dir():
        raise CheckpointError(
            f"{options.folder} is not a folder; name one here, or org/name of the Hugging Face Hub"
        )
    universal = find_universal(folder)
    megatron = universal is None and is_megatron_folder(folder)
    if megatron and options.hf_config is not None:
        raise CheckpointError(
            f"{folder} is a Megatron-LM checkpoint, whose args give the model's shape; leave out --hf-config"
        )
    if not megatron and options.vocab_size is not None:
        raise CheckpointError(
            f"{options.folder} is not a Megatron-LM checkpoint, the only kind --vocab-size is for; leave it out"
        )
    if universal is not None:
        return _import_universal(universal, options)
    if megatron:
        return _import_megatron(folder, options)
    if (folder / MANIFEST).is_file() or find_latest(folder / "checkpoints") is not None:
        raise CheckpointError(
            f"{options.folder} is a megalite checkpoint already; name it in checkpoint.resume or megalite generate"
        )
    if options.hf_config is None and folder.is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{options.folder} has no config.json (Hugging Face), no {LATEST_UNIVERSAL} file or {ZERO} folder"
            " (DeepSpeed universal), and no mp_rank_* folders (Megatron-LM); name a folder with one of them"
        )
    shape = shape_of_folder(str(options.hf_config or options.folder))
    from megalite.convert.huggingface.load import import_checkpoint

    folder = local_folder(options.folder)
    with working(f"importing {options.folder}"):
        checkpoint = import_checkpoint(folder, shape, options.output)
    print(f"{checkpoint}: {parameter_count(shape):,} parameters of a {shape.family} from {options.folder}")
    description = options.hf_config or folder
    description = description / "config.json" if description.is_dir() else description
    for note in notes_of(FAMILIES[shape.family], json.loads(description.read_text(encoding="utf-8"))):
        print(f"  {description} {note}")
    return 0


def _import_universal(universal: Path, options: argparse.Namespace) -> int:
    if (hf_config := options.hf_config or find_config(universal)) is None:
        raise CheckpointError(
            f"{universal} has no config.json, which gives the model's shape; name it with --hf-config"
        )
    shape = shape_of_folder(str(hf_config))
    from megalite.convert.universal.load import import_universal

    with working(f"importing {universal}"):
        checkpoint = import_universal(universal, shape, hf_config, options.output)
    settings = require_whole(checkpoint).config["optimizer"].items()
    print(f"{checkpoint}: weights and AdamW's state of a {shape.family} from {universal}")
    print("the position in the data is not known: a run that resumes from it starts at its first sample")
    print("trained with " + ", ".join(f"optimizer.{name} = {value}" for name, value in settings))
    return 0


def _import_megatron(folder: Path, options: argparse.Namespace) -> int:
    from megalite.convert.megatron.load import import_megatron

    with working(f"importing {folder}"):
        done = import_megatron(folder, options.output, options.vocab_size)
    count, kind = parameter_count(done.shape), str(done.dtype).removeprefix("torch.")
    print(f"{done.checkpoint}: {count:,} parameters of {kind}, iteration {done.iteration} of {folder}")
    for note in done.notes:
        print(f"  {note}")
    print("  weights only: a run that starts from it begins with a new optimizer state")
    return 0
