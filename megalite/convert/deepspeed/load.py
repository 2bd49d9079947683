"""A checkpoint of DeepSpeed's engine of a Hugging Face model: weights, moments, step, samples and loss scale."""

from collections.abc import Iterator
from pathlib import Path

from megalite.checkpoint.manifest import WEIGHT
from megalite.config.sources.huggingface import shape_of_folder
from megalite.convert.deepspeed.adam_settings import precision
from megalite.convert.deepspeed.engine_states import EngineStates
from megalite.convert.deepspeed.folder import engine_files
from megalite.convert.deepspeed.training_state import counters, loss_scale, notes, settings_of_engine
from megalite.convert.foreign.checkpoint import ForeignCheckpoint, ImportOptions
from megalite.convert.foreign.family_states import FamilyStatesReader
from megalite.convert.foreign.inspect import tensor_lines
from megalite.convert.foreign.places import find_config
from megalite.convert.foreign.streamed import ImportedRun
from megalite.convert.foreign.unpickle import require_undamaged
from megalite.convert.universal.folder import MOMENTS
from megalite.errors import CheckpointError, counted


def open_checkpoint(place: Path, options: ImportOptions) -> ForeignCheckpoint:
    """Open a TAG folder's weights, moments and training state; every file is compared with its checksums.

    Raises CheckpointError when it does not hold exactly the model of its config.json, or no config.json is known.
    """
    hf_config = options.hf_config or find_config(place)
    if hf_config is None:
        raise CheckpointError(
            f"neither {place} nor {place.resolve().parent} has a config.json, which gives the model's shape; name it"
            " with --hf-config"
        )
    files = engine_files(place)
    states = EngineStates(files)
    reader = FamilyStatesReader(states, shape := shape_of_folder(str(hf_config)))
    for path in (*files.model, *files.optimizer):
        require_undamaged(path)
    state = counters(states)
    run = ImportedRun(
        shape,
        {"optimizer": {"name": "adamw", **settings_of_engine(states)}},
        state_keys=(WEIGHT, *MOMENTS),
        trainer_state=state,
        optimizer={"step": states.trained.step, **loss_scale(states.trained.table)},
    )
    lines = [*notes(states)]
    return ForeignCheckpoint(run, reader, state["step"], hf_config, lines, precision(states.model.settings))


def describe(place: Path) -> Iterator[str]:
    """Yield the lines of `megalite convert inspect`."""
    files = engine_files(place)
    states = EngineStates(files)
    state, ranks = counters(states), max(1, len(files.optimizer))
    size_bytes = sum(path.stat().st_size for path in (*files.model, *files.optimizer))
    over = f"ZeRO {states.trained.stage} over {counted(ranks, 'data-parallel rank')}"
    yield f"{place}: a checkpoint of DeepSpeed's engine, {over}"
    yield (
        f"  step {state['step']:,}, {states.trained.step:g} updates, {state['samples']:,} samples;"
        f" {size_bytes:,} bytes in {counted(len(files.model) + len(files.optimizer), 'file')}"
    )
    for name, value in settings_of_engine(states).items():
        yield f"  optimizer.{name} = {value}"
    for name, value in loss_scale(states.trained.table).items():
        yield f"  {name} = {value}"
    has = {name: "frozen" if name in states.frozen else "fp32, exp_avg, exp_avg_sq" for name in states.names}
    yield from tensor_lines({name: (states.size(name, WEIGHT), said) for name, said in has.items()})
