"""The inputs of a run: tokenizer, token files, weights, the checkpoint to go on from."""

from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.folder import find_checkpoint, find_latest
from megalite.config.schema import RunConfig
from megalite.convert.huggingface.files import local_folder
from megalite.convert.huggingface.origin import find_origin, keep_origin
from megalite.data.ensure import RunData, ensure_data
from megalite.train.run_folder import RunFolder


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, made once and shared by all ranks."""

    data: RunData
    weights: str | None
    """The initial weights unless a checkpoint is resumed: a Hugging Face folder, or org/name@commit of the Hub."""


def prepare_inputs(config: RunConfig, folder: RunFolder) -> RunInputs:
    """Fetch the weights, train the tokenizer and prepare the token files, each unless it was done before.

    Called by one process before the ranks start, and by rank 0 after; starts no threads, so that ranks can be forked.
    """
    if config.model.weights and found_to_resume(config, folder) is None:
        local_folder(config.model.weights)
    data = ensure_data(config, folder.root)
    _keep_origin(config, folder)
    return RunInputs(data, config.model.weights)


def _keep_origin(config: RunConfig, folder: RunFolder) -> None:
    """Keep the Hugging Face keys of the model that the run goes on from, for its exports."""
    resumed = found_to_resume(config, folder)
    of_checkpoint = None if resumed is None else find_origin(resumed)
    named = config.checkpoint.export_like
    for origin in (of_checkpoint, None if named is None else Path(named)):
        if origin is not None:
            keep_origin(origin, folder.root)


def found_to_resume(config: RunConfig, folder: RunFolder) -> Path | None:
    """Return the checkpoint that `checkpoint.resume` names; None: the run starts at step 0."""
    if config.checkpoint.resume == "never":
        return None
    auto = config.checkpoint.resume == "auto"
    return find_latest(folder.checkpoints) if auto else find_checkpoint(Path(config.checkpoint.resume))
