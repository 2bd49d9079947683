"""Loading a checkpoint into any layout: every rank looks up its regions by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.checkpoint.failures import explain
from megalite.checkpoint.folder import older_checkpoints
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.weights import TensorTarget, shard_targets, targets
from megalite.config.sections.shape_settings import as_settings
from megalite.config.sections.toml import shown
from megalite.errors import CheckpointError
from megalite.model.replica import Replica
from megalite.parallel.mesh import ParallelMesh, all_or_none
from megalite.topology.adapter import Lora
from megalite.topology.shape import ModelShape
from megalite.topology.state import EMA, MASTER, OptimizerState

# These may differ between a checkpoint and the model it is loaded into.
_FREE_FIELDS = ("max_position_embeddings", "initializer_range")
# They start as the weights where a checkpoint has none, and are left out where the optimizer keeps none.
_COPIES = frozenset({MASTER, EMA})


def load_checkpoint(checkpoint: Path, replica: Replica, optimizer: OptimizerState) -> Manifest:
    """Fill this rank's stage, and its optimizer's state, from a checkpoint of any layout. Collective over the world.

    Returns the manifest, whose `trainer_state` says where the run stood. Beside the model there is in memory, for each
    thread, one tensor of which the checkpoint has other regions. Raises CheckpointError, on every rank alike, when the
    checkpoint does not fit or is damaged; then the stage may be filled in part.
    """
    mesh = replica.mesh
    state_keys = _keys_of_all_ranks(optimizer, mesh, checkpoint)

    def load() -> Manifest:
        with CheckpointReader(checkpoint, weights=None) as reader:
            check_fits(reader.manifest, replica.shape, checkpoint)
            _check_optimizer(reader.manifest, state_keys, checkpoint)
            reader.fill_all(_targets(reader, replica, optimizer))
            return reader.manifest

    manifest = all_or_none(mesh, load, explain(mesh, "load", checkpoint))
    optimizer.load(manifest.optimizer)
    if optimizer.weights() is not None:  # the ranks have gathered each other's partitions
        replica.unset.difference_update(each.name for each in replica.trained)
    return manifest


def files_needed(checkpoint: Path, replica: Replica, optimizer: OptimizerState) -> set[str]:
    """Return the files that `load_checkpoint` would read on this rank; only the manifest has to be here. Collective."""
    mesh = replica.mesh
    state_keys = _keys_of_all_ranks(optimizer, mesh, checkpoint)

    def needed() -> set[str]:
        with CheckpointReader(checkpoint, weights=None) as reader:
            check_fits(reader.manifest, replica.shape, checkpoint)
            _check_optimizer(reader.manifest, state_keys, checkpoint)
            return {file for each in _targets(reader, replica, optimizer) for file in reader.files_of(each)}

    return all_or_none(mesh, needed, explain(mesh, "load", checkpoint))


def _targets(reader: CheckpointReader, replica: Replica, optimizer: OptimizerState) -> Iterator[TensorTarget]:
    """Yield the weights and the state of the optimizer; the weights that it keeps in partitions, if it does."""
    mesh, partitions, tensors = replica.mesh, optimizer.weights(), replica.tensors
    for parameter in (*(replica.trained if partitions is None else ()), *replica.counted):
        yield from targets(parameter, tensors[parameter.name], mesh)
        replica.unset.discard(parameter.name)
    for shard in partitions or ():
        yield from shard_targets(shard, reader.weights, mesh)
    for shard in optimizer.shards():
        missing = shard.key in _COPIES - reader.manifest.optimizer_state_keys
        yield from shard_targets(shard, reader.weights if missing else shard.key, mesh)


def intact_instead(checkpoint: Path) -> Path | None:
    """In place of a damaged checkpoint the newest older one that has all the bytes that were written to it.

    None where there is none, or where `checkpoint` itself is intact, so that something else is wrong.
    """
    if _is_intact(checkpoint):
        return None
    return next((each for each in older_checkpoints(checkpoint) if _is_intact(each)), None)


def _is_intact(checkpoint: Path) -> bool:
    try:
        with CheckpointReader(checkpoint) as reader:
            reader.read_all()
    except CheckpointError:
        return False
    return True


def check_fits(manifest: Manifest, shape: ModelShape, checkpoint: Path) -> None:
    """Raise CheckpointError unless the checkpoint is one of this model, naming every setting that differs."""
    written, fields = ({"experts": None} | vars(model) for model in (manifest.model, shape))
    # Dynamic NTK computes its frequencies from max_position_embeddings.
    dynamic = shape.rope_scaling is not None and shape.rope_scaling.rope_type == "dynamic"
    free = {*_FREE_FIELDS} - ({"max_position_embeddings"} if dynamic else set())
    names = fields.keys() & written.keys() - free
    differing = [name for name in fields if name in names and fields[name] != written[name]]
    if differing:
        lines = [line for name in differing for line in _difference(name, fields[name], written[name])]
        raise CheckpointError(
            "\n  ".join(
                [f"{checkpoint} is a checkpoint of another model; use the settings of its model", *lines]
            )
        )


def _difference(name: str, here: Any, there: Any) -> Iterator[str]:
    """Yield each setting that differs, with both values; of an adapter or a scaling of another kind the kind alone."""
    settings, written = _settings(name, here), _settings(name, there)
    kind = next(iter(settings))
    for setting in (
        [kind] if settings[kind] != written[kind] else [*settings, *(written.keys() - settings.keys())]
    ):
        if (value := settings.get(setting)) != (other := written.get(setting)):
            sides = ("not set" if side is None else shown(side) for side in (value, other))
            yield "{}: {} here, {} in the checkpoint".format(setting, *sides)


def _settings(name: str, value: Any) -> dict[str, Any]:
    """Return the settings of [model] or [adapter] that say a field of ModelShape, that of the kind first."""
    if name == "adapter":
        kind = "none" if value is None else "lora" if isinstance(value, Lora) else "prefix"
        settings = {"kind": kind, **({} if value is None else vars(value))}
        return {f"adapter.{key}": each for key, each in settings.items()}
    settings = (
        {"rope_type": "default"} if (name, value) == ("rope_scaling", None) else as_settings({name: value})
    )
    return {f"model.{key}": each for key, each in settings.items()}


def _keys_of_all_ranks(optimizer: OptimizerState, mesh: ParallelMesh, checkpoint: Path) -> frozenset[str]:
    """The state keys that the optimizer keeps on any rank; a rank with an empty partition has none. Collective."""
    explained = explain(mesh, "load", checkpoint)
    own = all_or_none(mesh, lambda: {shard.key for shard in optimizer.shards()}, explained)
    gathered = mesh.gather_objects(own)
    keys: frozenset[str] = mesh.broadcast_object(frozenset().union(*gathered or []))
    return keys


def _check_optimizer(manifest: Manifest, expected: frozenset[str], checkpoint: Path) -> None:
    """Raise CheckpointError unless the checkpoint's optimizer is the one that goes on: no state is made up or lost."""
    stored = manifest.optimizer_state_keys
    if "step" not in manifest.optimizer:
        raise CheckpointError(
            f"{checkpoint} holds weights but no optimizer state to resume; start a new run from them with"
            " model.weights = a Hugging Face folder (megalite convert export writes one)"
        )
    if expected - _COPIES != stored - _COPIES:
        written = manifest.config.get("optimizer") or {}
        settings = (f"optimizer.{name} = {written[name]}" for name in ("name", "momentum") if name in written)
        raise CheckpointError(
            f"the checkpoint's optimizer state is {sorted(stored) or 'empty'}, this optimizer's is"
            f" {sorted(expected) or 'empty'}; set optimizer.name and its settings to those of the checkpoint"
            f" ({', '.join(settings)}), or start a run from its weights with model.weights = its export"
        )
