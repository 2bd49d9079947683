"""This rank's share of one copy of the model, with all that says where it stands."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from megalite.errors import listed
from megalite.model.transformer import Stage
from megalite.parallel.mesh import ParallelMesh
from megalite.topology.parameters import Parameter
from megalite.topology.shape import ModelShape
from megalite.topology.stages import PipelineSplit


@dataclass(frozen=True)
class Replica:
    """The stage that this rank holds of a model of `shape`, whose layers `split` spreads over the stages of `mesh`.

    unset: the parameters whose memory nobody has written yet. Raises AssertionError when the stage's registered
    parameters are not exactly those of the topology, by name and local shape.
    """

    shape: ModelShape
    split: PipelineSplit
    mesh: ParallelMesh
    stage: Stage
    unset: set[str] = field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        expected = {each.name: self.mesh.local_shape(each) for each in self.parameters}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if shapes != expected:
            differing = sorted(dict(shapes.items() ^ expected.items()))
            raise AssertionError(f"stage and topology disagree: {', '.join(differing)}")

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The registered parameters of this stage, in model order."""
        return self.mesh.parameters(self.shape, self.split)

    @cached_property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that the optimizer changes; with an adapter a few, else all."""
        return tuple(each for each in self.parameters if each.trained)

    @cached_property
    def counted(self) -> tuple[Parameter, ...]:
        """The parameters that the counts of a step change in place of a gradient; they are in checkpoints too."""
        return tuple(each for each in self.parameters if each.by_counts)

    def require_weights(self) -> None:
        """Raise AssertionError unless every parameter has been drawn or loaded."""
        if self.unset:
            raise AssertionError(f"neither drawn nor loaded: {listed(sorted(self.unset))}")

    @property
    def trained_tensors(self) -> dict[str, nn.Parameter]:
        """Name -> this rank's shard of each parameter that the optimizer changes."""
        tensors = self.tensors
        return {each.name: tensors[each.name] for each in self.trained}

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        """Name -> this rank's shard of each registered parameter."""
        return dict(self.stage.named_parameters())
