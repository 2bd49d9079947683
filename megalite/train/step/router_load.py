"""The load of each expert in a step of a mixture, and the biases of the routers that follow from it.

The biases are those of Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts". Counts
are whole numbers of the global batch, so that biases are the same in every layout.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megalite.errors import listed
from megalite.model.moe import Mixture, Router
from megalite.model.replica import Replica
from megalite.topology.experts import MixtureShape

# Steps without a token after which an expert counts as dead: chance leaves none out so often.
DEAD_STEPS = 100


def no_token(dead: Sequence[str]) -> str:
    """Return the warning about experts that died."""
    which, they = (f"{dead[0]} has", "it") if len(dead) == 1 else (f"{listed(dead)} have", "them")
    return (
        f"{which} had no token in {DEAD_STEPS} steps, and nothing trains {they}; raise training.router_balance or"
        " training.router_bias_rate, or lower optimizer.learning_rate"
    )


class RouterLoad:
    """The routers of a replica, none in a dense model. Counts are in the order of the layers that have experts."""

    def __init__(self, replica: Replica, bias_rate: float):
        """bias_rate: by how much a step moves the correction bias of each expert."""
        shape, self._mesh, self._rate = replica.shape, replica.mesh, bias_rate
        experts = shape.experts if isinstance(shape, MixtureShape) else None
        self._number = 0 if experts is None else experts.num_experts
        self._layers = [layer for layer in range(shape.num_hidden_layers) if shape.has_experts(layer)]
        modules = dict(replica.stage.named_modules())
        self._routers: dict[int, Router] = {}
        for place, layer in enumerate(self._layers):
            mixture = modules.get(f"model.layers.{layer}.mlp")  # on this rank's stage
            if isinstance(mixture, Mixture):
                self._routers[place] = mixture.gate
        # Ranks of tp that share each expert route the same tokens, unless they have parts of the sequences.
        self._counts_here = self._mesh.tp.rank == 0 or self._mesh.splits_sequence
        self.of_layers: dict[str, float] = {}
        """`expert_load` of each layer with experts in the last step, for monitor.layers_every."""
        self._idle_steps = torch.zeros(len(self._layers), self._number, dtype=torch.int64)

    def take_share(self) -> Tensor:
        """Return and clear this rank's counts and losses of the step, [layers * E + 1] float64; [0] without experts.

        Those of all ranks sum to the global batch's.
        """
        if not self._layers:
            return torch.zeros(0, dtype=torch.float64, device=self._mesh.device)
        device = self._mesh.device
        counts = torch.zeros(len(self._layers), self._number, dtype=torch.float64, device=device)
        losses = torch.zeros(1, dtype=torch.float64, device=device)
        for place, router in self._routers.items():
            counts[place] = router.counts
            losses += router.losses
            router.counts.zero_()
            router.losses.zero_()
        share = torch.cat((counts.flatten(), losses))
        return share if self._counts_here else torch.zeros_like(share)

    def stepped(self, totals: Tensor, sequences: int, *, skipped: bool) -> dict[str, float]:
        """Move the biases, unless the step was skipped, and return the figures of the step, as below.

        totals: the sum of all ranks' shares. sequences: of the global batch.
        """
        if self._rate and not skipped:
            self._move_biases(totals)
        return self._figures(totals, sequences) if self._layers else {}

    @torch.no_grad()
    def _move_biases(self, totals: Tensor) -> None:
        """Raise the biases of experts below the mean load of their layer by the rate, and lower those above it."""
        loads = self._loads(totals)
        for place, router in self._routers.items():
            if (bias := router.e_score_correction_bias) is not None:
                bias.add_(torch.sign(loads[place].mean() - loads[place]).to(bias.dtype), alpha=self._rate)

    def _figures(self, totals: Tensor, sequences: int) -> dict[str, float]:
        """Return the load of the step: the same in every layout.

        expert_load: the tokens of the fullest expert over the mean, in the layer where it is largest. router_entropy:
        of the shares of the tokens, over that of an even load, in the layer where it is smallest. idle_experts: those
        of all layers without a token. router_loss: the losses of all routers, a mean over the sequences.
        """
        totals = totals.cpu()
        loads = self._loads(totals)
        self._idle_steps = torch.where(loads > 0, 0, self._idle_steps + 1)
        shares = loads / loads.sum(dim=1, keepdim=True)
        entropy = torch.special.entr(shares).sum(dim=1) / torch.tensor(float(max(2, self._number))).log()
        fullest = (shares * self._number).amax(dim=1)
        layers = zip(self._layers, fullest.tolist(), strict=True)
        self.of_layers = {f"expert_load/layers.{layer}": load for layer, load in layers}
        return {
            "expert_load": float(fullest.max()),
            "router_entropy": float(entropy.min()),
            "idle_experts": float((loads == 0).sum()),
            "router_loss": float(totals[-1]) / sequences,
        }

    @property
    def idle_experts(self) -> list[list[int]]:
        """Layer, number and steps since the last token of each expert that had none in the last step."""
        places = self._idle_steps.nonzero().tolist()
        return [
            [self._layers[place], expert, int(self._idle_steps[place, expert])] for place, expert in places
        ]

    def go_on(self, idle_experts: Iterable[Sequence[int]]) -> None:
        """Count on from the idle experts of a checkpoint; those of any layout are the same."""
        self._idle_steps.zero_()
        for layer, expert, steps in idle_experts:
            if layer in self._layers and 0 <= expert < self._number:
                self._idle_steps[self._layers.index(layer), expert] = steps

    def newly_dead(self) -> list[str]:
        """Return the experts that now had no token in DEAD_STEPS steps, as a message names them."""
        places = (self._idle_steps == DEAD_STEPS).nonzero().tolist()
        return [f"expert {expert} of layer {self._layers[place]}" for place, expert in places]

    def _loads(self, totals: Tensor) -> Tensor:
        return totals[:-1].view(len(self._layers), self._number)
