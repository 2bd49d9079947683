"""megalite convert import: write a Hugging Face folder, or another program's checkpoint, as a megalite one."""

import argparse
import json
from pathlib import Path

from megalite.checkpoint.folder import find_latest
from megalite.checkpoint.manifest import MANIFEST
from megalite.cli.arguments import add_value
from megalite.config.sources.hub import HubName
from megalite.config.sources.huggingface import notes_of, shape_of_folder
from megalite.convert.formats import FORMATS, ForeignFormat, find_format
from megalite.convert.huggingface.files import local_folder
from megalite.errors import CheckpointError
from megalite.families.registry import FAMILIES
from megalite.monitor.work import working
from megalite.topology.parameters import parameter_count


def add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `import` to the commands of `megalite convert`."""
    importing = commands.add_parser(
        "import",
        help="write a Hugging Face folder, or another program's checkpoint, as a megalite checkpoint",
    )
    importing.add_argument(
        "folder",
        metavar="FOLDER",
        help="Hugging Face folder with config.json and safetensors files, or org/name[@revision] on its Hub; or a"
        f" checkpoint folder: {', '.join(known.name for known in FORMATS)}",
    )
    importing.add_argument("output", type=Path, metavar="RUN", help="run folder to write")
    about = "config.json of the model, or its folder, for checkpoints that do not describe their model"
    add_value(importing, "--hf-config", Path, "PATH", about)
    about = "vocabulary size, for checkpoints that do not record the size before padding"
    add_value(importing, "--vocab-size", int, "TOKENS", about)
    importing.set_defaults(command=run_import)


def run_import(options: argparse.Namespace) -> int:
    """Run `megalite convert import`; the folder's files decide its format. Raises CheckpointError, ConfigError."""
    folder = Path(options.folder).expanduser()
    if HubName.of(options.folder) is None and not folder.is_dir():
        raise CheckpointError(
            f"{options.folder} is not a folder; name one here, or org/name of the Hugging Face Hub"
        )
    found = find_format(folder)
    for option in ("hf_config", "vocab_size"):
        if getattr(options, option) is not None and not _takes(found and found[0], option):
            raise CheckpointError(_unused(options.folder, found and found[0], option))
    if found is not None:
        return _import_foreign(*found, options)
    if (folder / MANIFEST).is_file() or find_latest(folder / "checkpoints") is not None:
        raise CheckpointError(
            f"{options.folder} is a megalite checkpoint already; name it in checkpoint.resume or megalite generate"
        )
    if options.hf_config is None and folder.is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{options.folder} has no config.json and safetensors files (Hugging Face), and is none of"
            f" {', '.join(known.name for known in FORMATS)}; name a folder with one of them"
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


def _takes(kind: ForeignFormat | None, option: str) -> bool:
    """Whether the option means something: a Hugging Face folder takes another config.json."""
    return option == "hf_config" if kind is None else option in kind.takes


def _unused(folder: str, kind: ForeignFormat | None, option: str) -> str:
    flag = f"--{option.replace('_', '-')}"
    name = "a Hugging Face folder" if kind is None else f"{kind.name}, which says that itself"
    return f"{folder} is {name}; leave out {flag}"


def _import_foreign(kind: ForeignFormat, place: Path, options: argparse.Namespace) -> int:
    from megalite.convert.foreign import ImportOptions, import_foreign

    loader = kind.loader()
    with working(f"importing {place}"):
        opened = loader.open_checkpoint(place, ImportOptions(options.hf_config, options.vocab_size))
        checkpoint = import_foreign(opened, options.output)
    run, dtype = opened.run, str(opened.run.dtype).removeprefix("torch.")
    step = "" if opened.step is None else f", step {opened.step:,}"
    print(f"{options.folder}: {kind.name}{step}")
    print(f"{checkpoint}: {parameter_count(run.shape):,} parameters of {dtype}, a {run.shape.family}")
    for note in opened.notes:
        print(f"  {note}")
    if len(run.state_keys) == 1:
        print("  weights only: a run that starts from it begins with a new optimizer state")
    elif not run.trainer_state["samples"]:
        print(
            "  with the optimizer's state; the position in the data is not known: a run begins with its first sample"
        )
    else:
        print(f"  with the optimizer's state, after {run.trainer_state['samples']:,} samples")
    return 0
