"""megalite convert import: write a Hugging Face folder, or another program's checkpoint, as a megalite one."""

import argparse
import json
from pathlib import Path
from shlex import quote

from megalite.checkpoint.folder import find_latest
from megalite.checkpoint.manifest import MANIFEST
from megalite.cli.convert_foreign import add_foreign_flags, find_foreign, import_found
from megalite.cli.results import report
from megalite.config.sources.hub import HubName
from megalite.config.sources.huggingface import notes_of, shape_of_folder
from megalite.convert.foreign.formats import FORMATS, ForeignFormat
from megalite.convert.foreign.new_run import require_new
from megalite.convert.foreign.run_file import write_import_run_file
from megalite.convert.huggingface.files import local_folder
from megalite.convert.trainer.folder import step_without_optimizer
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
    add_foreign_flags(importing)
    importing.set_defaults(command=run_import)


def run_import(options: argparse.Namespace) -> int:
    """Run `megalite convert import`; the folder's files decide its format. Raises CheckpointError, ConfigError."""
    folder = Path(options.folder).expanduser()
    if HubName.of(options.folder) is None and not folder.is_dir():
        raise CheckpointError(
            f"{options.folder} is not a folder; name one here, or org/name of the Hugging Face Hub"
        )
    if (found := find_foreign(folder, options)) is not None:
        return _import_foreign(*found, options)
    if options.vocab_size is not None:
        raise CheckpointError(f"{options.folder} is a Hugging Face folder; leave out --vocab-size")
    if (folder / MANIFEST).is_file() or find_latest(folder / "checkpoints") is not None:
        raise CheckpointError(
            f"{options.folder} is a megalite checkpoint already; name it in checkpoint.resume or megalite generate"
        )
    if options.hf_config is None and folder.is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{options.folder} has no config.json and safetensors files (Hugging Face), and is none of"
            f" {', '.join(known.name for known in FORMATS)}; name a folder with one of them"
        )
    require_new(options.output)  # before the source is fetched
    shape = shape_of_folder(str(options.hf_config or options.folder))
    from megalite.convert.huggingface.load import import_checkpoint

    folder = local_folder(options.folder)
    with working(f"importing {options.folder}"):
        checkpoint = import_checkpoint(folder, shape, options.output)
    report(checkpoint=checkpoint, family=shape.family, parameters=parameter_count(shape))
    print(f"{checkpoint}: {parameter_count(shape):,} parameters of a {shape.family} from {options.folder}")
    description = options.hf_config or folder
    description = description / "config.json" if description.is_dir() else description
    for note in notes_of(FAMILIES[shape.family], json.loads(description.read_text(encoding="utf-8"))):
        print(f"  {description} {note}")
    if (step := step_without_optimizer(folder)) is not None:
        print(
            f"  {folder} is of step {step:,}, but its optimizer's state is missing: weights only, as step 0"
        )
    print(f"next: megalite train --model.weights {quote(options.folder)} --data.source TEXT")
    return 0


def _import_foreign(kind: ForeignFormat, place: Path, options: argparse.Namespace) -> int:
    checkpoint, opened = import_found(kind, place, options.output, options)
    run, dtype = opened.run, str(opened.run.dtype).removeprefix("torch.")
    step = "" if opened.step is None else f", step {opened.step:,}"
    print(f"{options.folder}: {kind.name}{step}")
    print(f"{checkpoint}: {parameter_count(run.shape):,} parameters of {dtype}, a {run.shape.family}")
    report(format=kind.name, checkpoint=checkpoint, family=run.shape.family)
    report(parameters=parameter_count(run.shape), step=opened.step, notes=opened.notes)
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
    precision = "fp16" if "loss_scale" in run.optimizer else opened.precision
    for line in write_import_run_file(checkpoint, precision):
        print(line)
    return 0
