"""The inputs of a run: tokenizer, token files, weights, the checkpoint to go on from."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megalite.checkpoint.folder import find_checkpoint, find_latest
from megalite.config.sections.schema import RunConfig
from megalite.convert.huggingface.files import local_folder
from megalite.convert.huggingface.origin import find_origin, keep_origin
from megalite.data.batches.stream_files import StreamFile
from megalite.data.ensure import RunData, ensure_data
from megalite.train.checkpoints.resume_check import ResumeCheck
from megalite.train.run_folder import RunFolder


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, made once and shared by all ranks."""

    data: RunData
    weights: str | None
    """The initial weights unless a checkpoint is resumed: a Hugging Face folder, or org/name@commit of the Hub."""

    def as_json(self) -> dict[str, Any]:
        """Return the inputs as values of JSON's types, for the ranks of other processes."""
        return asdict(self, dict_factory=lambda items: {name: _as_text(value) for name, value in items})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunInputs":
        """Return the inputs that `as_json` described."""
        data = values["data"]
        read = RunData(
            tokenizer=None if data["tokenizer"] is None else Path(data["tokenizer"]),
            train=tuple(map(Path, data["train"])),
            weights=tuple(data["weights"]),
            validation=tuple(map(Path, data["validation"])),
            test=tuple(map(Path, data["test"])),
            notes=tuple(data["notes"]),
            stream=tuple(StreamFile(Path(each["path"]), each["size_bytes"]) for each in data["stream"]),
            fingerprints=data["fingerprints"],
        )
        return cls(read, values["weights"])


def _as_text(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_as_text(each) for each in value] if isinstance(value, tuple) else value


def prepare_inputs(config: RunConfig, folder: RunFolder) -> RunInputs:
    """Fetch the weights, train the tokenizer and prepare the token files, each unless it was done before.

    Called by one process before the ranks start, and by rank 0 after; starts no threads, so that ranks can be forked.
    """
    resumed = found_to_resume(config, folder)
    if config.model.weights and (config.adapter.kind != "none" or resumed is None):
        local_folder(config.model.weights)
    check = None if resumed is None else ResumeCheck(resumed, config)
    if check is not None:
        check.require_same_run()
        check.require_same_samples()
    data = ensure_data(config, folder.root, changed="" if check is None else check.text_settings)
    if check is not None:
        data = replace(data, notes=(*data.notes, *check.require_same_data(data)))
    _keep_origin(config, folder, resumed)
    return RunInputs(data, config.model.weights)


def _keep_origin(config: RunConfig, folder: RunFolder, resumed: Path | None) -> None:
    """Keep the Hugging Face keys of the model that the run goes on from, for its exports."""
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
