"""Open a checkpoint of any format for a comparison: what it says of itself, and a reader of its tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.folder import find_checkpoint, published_checkpoints
from megalite.checkpoint.manifest import MANIFEST, WEIGHT, Manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.regions import full_slice, index_in, rows_of
from megalite.checkpoint.weights import BLOCK_ELEMENTS, WeightReader
from megalite.config.sources.hub import HubName
from megalite.config.sources.huggingface import shape_of_folder
from megalite.config.sources.peft import ADAPTER_CONFIG, adapter_of_folder
from megalite.convert.foreign.checkpoint import ImportOptions
from megalite.convert.foreign.formats import ForeignFormat, find_format
from megalite.convert.huggingface.files import is_folder_of_weights, local_folder
from megalite.convert.huggingface.load import HuggingFaceReader
from megalite.convert.peft.base import base_of_adapter, folder_of_base
from megalite.convert.peft.merged import AdaptedWeights
from megalite.convert.peft.read import open_adapter
from megalite.topology.adapter import Lora
from megalite.topology.parameters import trained_tensors
from megalite.topology.shape import ModelShape
from megalite.topology.state import MASTER, state_tensors

States = Mapping[str, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class CheckpointSide:
    """One of two checkpoints that are compared.

    described: its format, layout and step in words. states: state key -> canonical name -> shape. scalars: what it
    knows beside its tensors: step, position in the data, loss scale, settings of the optimizer. own: whether it is
    megalite's, which records each state and scalar that training goes on from. base: opens the folder of the weights
    that an adapter belongs to.
    """

    path: Path
    described: str
    shape: ModelShape
    states: States
    scalars: Mapping[str, Any]
    reader: WeightReader
    own: bool = False
    base: Callable[[], Path] | None = None

    def exact(self, name: str) -> str:
        """Return the state key of a tensor's unrounded weights."""
        return MASTER if name in self.states.get(MASTER, {}) else WEIGHT

    def blocks(self, state_key: str, name: str) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, in blocks of whole rows: of BLOCK_ELEMENTS, or of at least one row."""
        shape = self.states[state_key][name]
        if isinstance(self.reader, CheckpointReader):
            yield from (block.reshape(-1) for block in self.reader.blocks(state_key, name))
            return
        for region in rows_of(full_slice(shape), self.reader.block_elements):
            values = self.reader.read(state_key, name, region)
            for block in rows_of(full_slice(region.shape), BLOCK_ELEMENTS):
                yield values[index_in(block, full_slice(region.shape))].reshape(-1)

    def merged(self) -> "CheckpointSide":
        """Return the whole model that an adapter and its base make; its reader closes with that of the adapter."""
        assert self.base is not None and isinstance(self.shape.adapter, Lora)
        reader = AdaptedWeights(_Exact(self), self.shape, self.base())
        plain = self.shape.base
        states = {WEIGHT: state_tensors(plain, (WEIGHT,))[WEIGHT]}
        text = f"{self.described}, merged into its base"
        return replace(
            self, described=text, shape=plain, states=states, reader=reader, own=False, scalars={}, base=None
        )


class _Exact(WeightReader):
    """The unrounded weights of an adapter."""

    def __init__(self, side: CheckpointSide):
        self._side = side

    def read(self, state_key: str, name: str, region: Any) -> Tensor:
        return self._side.reader.read(self._side.exact(name), name, region)

    def close(self) -> None:
        self._side.reader.close()


@contextmanager
def open_side(path: str, options: ImportOptions) -> Iterator[CheckpointSide]:
    """Open what `path` names: a run, a checkpoint of any format, a folder of Hugging Face or PEFT, or org/name.

    options: for formats that do not describe their model; ignored by the others. Raises CheckpointError as the format's
    reader does: where files are missing or damaged, or do not hold exactly a model's tensors.
    """
    side = _side_of(path, options)
    with side.reader:
        yield side


def options_taken(path: str) -> frozenset[str]:
    """Return the names of the ImportOptions that mean something for the checkpoint at `path`."""
    folder = Path(path).expanduser()
    found = find_format(folder) if folder.is_dir() and not _is_own(folder) else None
    return frozenset() if found is None else found[0].takes


def _side_of(path: str, options: ImportOptions) -> CheckpointSide:
    folder = Path(path).expanduser()
    if HubName.of(path) is not None:
        return _huggingface(local_folder(path))
    if not folder.is_dir() or _is_own(folder):
        return _checkpoint(find_checkpoint(folder))
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapter(folder)
    if (found := find_format(folder)) is not None:
        known = {name: value for name, value in asdict(options).items() if name in found[0].takes}
        return _foreign(*found, ImportOptions(**known))
    return _huggingface(folder) if is_folder_of_weights(folder) else _checkpoint(find_checkpoint(folder))


def _is_own(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or any(map(published_checkpoints, (folder, folder / "checkpoints")))


def _checkpoint(folder: Path) -> CheckpointSide:
    reader = CheckpointReader(folder)
    manifest = reader.manifest
    states = {
        key: {name: entry.shape for name, entry in entries.items()}
        for key, entries in manifest.tensors.items()
    }
    stage = ((manifest.config.get("deepspeed") or {}).get("zero_optimization") or {}).get("stage", 0)
    zero = f", ZeRO {stage}" if stage else ""
    described = f"a megalite checkpoint of {manifest.layout.text}{zero}, step {manifest.step:,}"
    return CheckpointSide(
        folder,
        described,
        manifest.model,
        states,
        _scalars(manifest),
        reader,
        own=True,
        base=None if manifest.model.adapter is None else lambda: folder_of_base(manifest.base),
    )


def _scalars(manifest: Manifest) -> dict[str, Any]:
    stream = {} if manifest.stream is None else {"stream": asdict(manifest.stream)}
    return {
        **manifest.trainer_state,
        **{f"optimizer.{name}": value for name, value in manifest.optimizer.items()},
        **stream,
        **{f"data: {name}": value for name, value in manifest.data.items()},
        **_settings(manifest.config),
    }


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the next update: those of the optimizer, and the length of the schedule."""
    own = {f"setting optimizer.{name}": value for name, value in (config.get("optimizer") or {}).items()}
    steps = (config.get("training") or {}).get("steps")
    return own | ({} if steps is None else {"setting training.steps": steps})


def _foreign(kind: ForeignFormat, place: Path, options: ImportOptions) -> CheckpointSide:
    opened = kind.loader().open_checkpoint(place, options)
    run = opened.run
    # A count of zero stands for one that the format does not have.
    counts = {name: value for name, value in run.trainer_state.items() if value}
    scalars = {
        **counts,
        **{f"optimizer.{name}": value for name, value in run.optimizer.items()},
        **_settings(run.config),
    }
    step = "" if opened.step is None else f", step {opened.step:,}"
    states = state_tensors(run.shape, run.state_keys)
    return CheckpointSide(place, f"{kind.name}{step}", run.shape, states, scalars, opened.reader)


def _huggingface(folder: Path) -> CheckpointSide:
    shape = shape_of_folder(str(folder))
    states = state_tensors(shape, (WEIGHT,))
    return CheckpointSide(
        folder, "a Hugging Face folder", shape, states, {}, HuggingFaceReader(folder, shape)
    )


def _adapter(folder: Path) -> CheckpointSide:
    base = base_of_adapter(folder)
    plain = shape_of_folder(str(base))
    shape = replace(plain, adapter=adapter_of_folder(folder, plain.family))
    states = {WEIGHT: trained_tensors(shape)}
    reader = open_adapter(folder, shape)
    described = "an adapter in PEFT's format"
    return CheckpointSide(folder, described, shape, states, {}, reader, base=lambda: base)
