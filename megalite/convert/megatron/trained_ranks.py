"""The weights with the optimizer's state of a `--ckpt-format torch` checkpoint, as canonical tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megalite.checkpoint.regions import full_slice, index_in
from megalite.checkpoint.weights import WeightReader
from megalite.convert.finite import require_finite
from megalite.convert.foreign.unpickle import require_undamaged
from megalite.convert.megatron.folder import DISTRIBUTED_OPTIMIZER
from megalite.convert.megatron.rank_files import MegatronReader, RankFile
from megalite.convert.megatron.rank_states import RankParameters, SavedRankStates, open_states
from megalite.convert.megatron.training_state import OptimizerNotRead, OptimizerScalars, require_masters_of
from megalite.errors import CheckpointError
from megalite.topology.parameters import EMBEDDING, HEAD
from megalite.topology.sharding import TensorSlice
from megalite.topology.state import WEIGHT


@dataclass
class TrainedReader(WeightReader):
    """Float32 masters, which are compared with the weights, and moments; one pipeline stage's files are open."""

    weights: MegatronReader
    scalars: OptimizerScalars
    # A tensor at once: each read joins the shards of all ranks.
    block_elements: int = field(default=1 << 62, init=False)
    _opened: tuple[int, Sequence[SavedRankStates]] | None = field(default=None, init=False)

    def close(self) -> None:
        self._opened = None
        self.weights.close()

    def read(self, state_key: str, name: str, region: TensorSlice) -> Tensor:
        """Return a region of a canonical tensor. Raises CheckpointError where masters are not those of the weights."""
        place, path = self.weights.place_of(name), self.weights.folder.path
        if self._opened is None or self._opened[0] != place.stage:
            self._opened = None
            self._opened = (place.stage, states_of(self.weights, place.stage))
        shards = [rank.tensors[place.chunk, place.name][state_key] for rank in self._opened[1]]
        whole = self.weights.whole(name, shards)
        values = whole[index_in(region, full_slice(tuple(whole.shape)))]
        if state_key == WEIGHT:
            require_masters_of(self.weights.read(WEIGHT, name, region), values, name, path)
        else:
            require_finite(values, f"{state_key} of {name}", path, region.offsets)
        return values


def open_trained(weights: MegatronReader) -> TrainedReader | None:
    """Open the optimizer's state of all ranks; None where none was saved, or, with a note, none that is read.

    Raises CheckpointError where a file is missing or damaged, or ranks differ in the number of updates.
    """
    scalars: OptimizerScalars | None = None
    try:
        for stage in range(weights.folder.pipeline):
            if all(rank.optimizer is None for rank in weights.ranks(stage)):
                return None
            for rank in weights.ranks(stage):
                if (beside := rank.path.with_name(DISTRIBUTED_OPTIMIZER)).is_file():
                    require_undamaged(beside)
            for rank, states in zip(weights.ranks(stage), states_of(weights, stage), strict=True):
                scalars = scalars or states.scalars
                if states.scalars.step != scalars.step:
                    raise CheckpointError(
                        f"{rank.path} has {states.scalars.step:g} updates of the optimizer, but other ranks"
                        f" {scalars.step:g}; fetch the files of one iteration"
                    )
    except OptimizerNotRead as error:
        weights.notes.append(f"the optimizer's state was left: {error}")
        return None
    return None if scalars is None else TrainedReader(weights, scalars)


def states_of(weights: MegatronReader, stage: int) -> list[SavedRankStates]:
    """Return the optimizer's states of a stage's tensor ranks."""
    return [_states(weights, stage, rank) for rank in weights.ranks(stage)]


def _states(weights: MegatronReader, stage: int, rank: RankFile) -> SavedRankStates:
    places = (weights.places.get(name) for name in (EMBEDDING, HEAD))
    is_tied = weights.shape.tie_word_embeddings and weights.folder.pipeline > 1
    shared = frozenset(
        (place.chunk, place.name)
        for place in places
        if place is not None and place.stage == stage and is_tied
    )
    beside = rank.path.with_name(DISTRIBUTED_OPTIMIZER)
    return open_states(
        rank.optimizer, RankParameters(rank.path, beside, rank.arguments, stage, rank.chunks, shared)
    )
