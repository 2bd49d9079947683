"""The time of a step on a calibrated machine, from the rates of its parts and a simulation of the schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from megalite.errors import ConfigError, Problem
from megalite.planner.calibration import Calibration, LinkKind, MeasuredLinks, MeasuredRanks, WholeStepTime
from megalite.planner.machine_rates import LayerWork, Passes, RankRates, link_seconds
from megalite.planner.planned_run import PlannedRun
from megalite.planner.shared_cores import makespan
from megalite.planner.stage_parameters import stage_counts
from megalite.topology.collective_sizes import BUCKET_BYTES
from megalite.topology.dtypes import PRECISIONS
from megalite.topology.experts import MixtureShape
from megalite.topology.parameters import stage_parameters
from megalite.topology.schedule_timeline import orders_of
from megalite.topology.schedules import Action
from megalite.topology.stages import pipeline_split


@dataclass(frozen=True)
class CalibratedMachine:
    """One machine with its measured rates, in the place of a cluster of cards from data sheets.

    cards_per_node: the ranks to plan for. usable: the share of the memory that a run may plan with.
    """

    calibration: Calibration
    cards_per_node: int
    usable: float = 0.92
    nodes: int = 1

    @property
    def card(self) -> str:
        return "cores" if self.on_cpu else self.calibration.device

    @property
    def on_cpu(self) -> bool:
        return self.calibration.device == "cpu"

    @property
    def cards(self) -> int:
        return self.cards_per_node

    @property
    def memory_bytes(self) -> int:
        """Bytes of a rank: its card's, or its share of the machine's."""
        return self.calibration.memory // (self.cards_per_node if self.on_cpu else 1)

    @property
    def watts(self) -> float | None:
        return None

    @property
    def assumptions(self) -> str:
        return f"measured on {self.calibration.machine} with torch {self.calibration.torch}"

    def peak(self, precision: str) -> float | None:
        """Return the operations a second of a rank's fastest measured product; None if nothing was measured."""
        if precision not in self.calibration.precisions:
            return None
        times = self.computing(self.cards_per_node, precision).products
        return max(2 * time.tokens * time.inputs * time.outputs / time.forward for time in times)

    def computing(self, ranks: int, precision: str) -> MeasuredRanks:
        """Return the measurement whose ranks are the nearest to `ranks`. Raises ConfigError without the precision."""
        measured = [each for each in self.calibration.computing if each.precision == precision]
        if not measured:
            known = " and ".join(self.calibration.precisions)
            message = f"was measured in {known}, and the run trains in {precision}"
            raise ConfigError(
                [
                    Problem(
                        "--calibration",
                        message,
                        "measure it with this run: megalite plan RUN.toml --calibrate",
                    )
                ]
            )
        fewer = [each for each in measured if each.ranks <= ranks]
        return max(fewer or measured, key=lambda each: each.ranks)


def calibrated_seconds(run: PlannedRun, machine: CalibratedMachine) -> Mapping[str, float]:
    """Return the seconds of a step by part, as `StepTime` has them. Raises ConfigError for what was not measured.

    That is another precision, experts, latent attention and context parallelism.
    """
    if isinstance(run.shape, MixtureShape) or run.layout.context > 1:
        message = "has no times of experts, latent attention and context parallelism"
        raise ConfigError([Problem("--calibration", message, "leave it out: plan with --card")])
    return _Step(run, machine).parts


class _Step:
    """The parts of one run's step. Seconds are those of a rank while all others compute too."""

    def __init__(self, run: PlannedRun, machine: CalibratedMachine):
        self.run, self.machine = run, machine
        self.ranks = run.layout.world_size
        measured = machine.computing(self.ranks, run.precision)
        self.rates = RankRates(measured, run.weight_bytes, queued=not machine.on_cpu)
        self.work = LayerWork(
            run.micro_batch_size, run.sequence_length, run.layout.tensor, run.positions, run.weight_bytes
        )
        self.measured = measured
        units = machine.calibration.units
        # Fewer ranks than measured ones have more threads each; more ranks than cores take turns.
        self.crowd = 1.0
        if machine.on_cpu:
            threads = max(1, units // self.ranks)
            self.crowd = max(1.0, self.ranks / units) * measured.threads / threads

    @property
    def parts(self) -> dict[str, float]:
        run, stages = self.run, self.run.split.stages
        name = run.schedule if stages > 1 else "1f1b"
        orders = orders_of(name, stages, run.micro_batches, run.split.chunks_per_stage)
        alone = {
            action: self._seconds(action, self.chunks[action.chunk]) for order in orders for action in order
        }
        sums = {
            action: self._seconds(action, self.sums[action.chunk]) for order in orders for action in order
        }
        message = self._message if stages > 1 else 0.0
        length = makespan(orders, lambda action: alone[action] + sums[action], message, self._pace)
        busy = max((sum(alone[action] for action in order), stage) for stage, order in enumerate(orders))
        compute = busy[0] * self.crowd
        tensor = sum(sums[action] for action in orders[busy[1]]) * self.crowd
        filled = 2 * (stages - 1) * message
        return {
            "compute": compute,
            "bubble": max(0.0, length - compute - tensor - filled),
            "tensor": tensor,
            "pipeline": filled,
            "data": self._data,
            "update": self._update,
            "fixed": self._fixed,
        }

    def _pace(self, stages: int) -> float:
        """Return the pace of a stage's ranks while so many stages compute."""
        if not self.machine.on_cpu or self.ranks == 1:
            return 1.0
        units, together = self.machine.calibration.units, self.measured.ranks
        computing = stages * self.ranks // self.run.split.stages
        threads = max(1, units // self.ranks)
        if computing >= together:
            pace = min(1.0, units / (computing * threads))
        else:
            pace = 1 + (together - computing) / (together - 1) * (self.measured.alone - 1)
        return pace * threads / self.measured.threads

    @cached_property
    def chunks(self) -> list[Passes]:
        """The seconds of one micro batch in each chunk."""
        run, chunks = self.run, []
        for chunk, layers in enumerate(run.split.layers):
            total = Passes()
            for layer, mode in zip(layers, run.training.recompute_modes(len(layers)), strict=True):
                passes = self._layer(layer)
                total += passes
                if mode == "full":
                    total += Passes(0.0, passes.forward) + self.rates.host_recompute
                elif mode == "selective":
                    again = self.rates.attended(run.shape, layer, self.work).forward
                    total += Passes(0.0, again) + self.rates.host_recompute
            if chunk == len(run.split.layers) - 1:
                total += self.rates.head(run.shape, self.work, run.model.chunked_loss)
            chunks.append(total)
        return chunks

    def _layer(self, layer: int) -> Passes:
        key = layer if self.run.shape.adapter is not None else self.run.shape.window_of(layer)
        if key not in self._layers:
            self._layers[key] = self.rates.layer(self.run.shape, layer, self.work)
        return self._layers[key]

    @cached_property
    def _layers(self) -> dict[int | None, Passes]:
        return {}

    @cached_property
    def sums(self) -> list[Passes]:
        """The seconds of the tensor-parallel collectives of one micro batch in each chunk."""
        run, ranks = self.run, self.run.layout.tensor
        if ranks == 1:
            return [Passes()] * len(run.split.layers)
        hidden = run.tokens * run.shape.hidden_size * run.weight_bytes
        if run.sequence_parallel:
            gather, scatter = (self._link(kind, hidden, ranks) for kind in ("all_gather", "reduce_scatter"))
            layer = Passes(2 * gather + 2 * scatter, 4 * gather + 2 * scatter)
        else:
            layer = Passes(1, 1).times(2 * self._link("all_reduce", hidden, ranks))
        # Links alone, measured without work between them, do not know how long ranks wait for each other.
        waits = self.rates.waits_of_layer(self._links(ranks), self._layer(0), self.crowd)
        layer += waits.times(1 / self.crowd)
        chunks = []
        for chunk, layers in enumerate(run.split.layers):
            full = run.training.recompute_modes(len(layers)).count("full")
            total = layer.times(len(layers)) + Passes(0.0, full * layer.forward)
            if chunk == 0:
                total += Passes(layer.forward / 2)
            if chunk == len(run.split.layers) - 1:
                total += Passes(3 * self._link("all_reduce", 4 * run.tokens, ranks), layer.backward / 2)
            chunks.append(total)
        return chunks

    def _seconds(self, action: Action, passes: Passes) -> float:
        return {
            "F": passes.forward,
            "B": passes.backward,
            "I": passes.backward - passes.of_weights,
            "W": passes.of_weights,
        }[action.kind]

    def _link(self, kind: LinkKind, size: float, group: int) -> float:
        """Return the seconds of a collective in a group, in units of which `crowd` makes seconds again."""
        return link_seconds(self._links(group), kind, size) / self.crowd

    def _links(self, group: int) -> MeasuredLinks:
        links = self.machine.calibration.links
        return min(links, key=lambda link: (abs(link.ranks - self.ranks), abs(link.group - group)))

    @property
    def _message(self) -> float:
        hidden = self.run.positions * self.run.shape.hidden_size * self.run.weight_bytes
        return self._link("message", hidden, 2) * self.crowd

    @property
    def _values(self) -> int:
        """The trained values of the stage with the most."""
        return max(stage_counts(self.run, stage).trained for stage in range(self.run.split.stages))

    @property
    def _data(self) -> float:
        run = self.run
        total = 0.0
        if run.copies > 1 and not run.zero_stage:
            size = run.gradient_bytes * self._values
            buckets = max(1, ceil(size / BUCKET_BYTES))
            total = buckets * self._link("all_reduce", size / buckets, run.copies) * self.crowd
            if not self.machine.on_cpu:
                total = max(0.0, total - max(passes.backward for passes in self.chunks))
        if run.shape.tie_word_embeddings and run.split.stages > 1 and run.shape.adapter is None:
            table = run.shape.vocab_size * run.shape.hidden_size // run.layout.tensor
            total += self._link("all_reduce", table * run.gradient_bytes, 2) * self.crowd
            total += self._link("message", table * run.weight_bytes, 2) * self.crowd
        return total

    @property
    def _update(self) -> float:
        run = self.run
        if run.zero_stage:
            return self._zero_update * self.crowd
        return self.rates.update(run.optimizer.name, self._values, self._tensors) * self.crowd

    @cached_property
    def _tensors(self) -> int:
        """The trained tensors of the first stage."""
        return sum(parameter.trained for parameter in stage_parameters(self.run.shape, self.run.split, 0))

    @property
    def _zero_update(self) -> float:
        """Return what a step with ZeRO takes beside forward and backward: sums, gathers, update."""
        times = [time for time in self.measured.steps if time.zero == self.run.zero_stage]
        if not times:  # measured without DeepSpeed: by its partitions and its collectives
            return self._partitioned_update
        values, share = self._values, 1.0
        if self.run.zero_stage == 3:  # frozen weights are gathered too, each tensor by hooks of its own
            values = stage_counts(self.run, 0).weights
            model = times[0].model
            measured = len(list(stage_parameters(model.shape, pipeline_split(model.layers), 0)))
            share = len(list(stage_parameters(self.run.shape, self.run.split, 0))) / measured
        return _four_points(times, self._rest, values, self.run.micro_batches, share)

    @property
    def _partitioned_update(self) -> float:
        run, copies = self.run, self.run.copies
        weights, gradients = self._values * run.weight_bytes, self._values * run.gradient_bytes
        rounds = run.micro_batches if run.zero_stage > 1 else 1
        gathers = 2 * rounds if run.zero_stage == 3 else 1
        return (
            self.rates.update(run.optimizer.name, self._values / copies, self._tensors)
            + rounds * self._link("reduce_scatter", gradients, copies)
            + gathers * self._link("all_gather", weights, copies)
        )

    @property
    def _fixed(self) -> float:
        if any(time.zero == self.run.zero_stage > 0 for time in self.measured.steps):
            return 0.0
        small = min(time.model.hidden for time in self.measured.steps)
        times = [time for time in self.measured.steps if time.zero == 0 and time.model.hidden == small]
        one, several = sorted(times, key=lambda time: time.micro_batches)
        each = (self._rest(several) - self._rest(one)) / (several.micro_batches - one.micro_batches)
        each = max(0.0, each)
        return max(0.0, self._rest(one) - each + each * self.run.micro_batches) * self.crowd

    def _rest(self, time: WholeStepTime) -> float:
        """Return the seconds of a whole step beyond its known parts; with ZeRO, beyond forward and backward."""
        model, rates = time.model, self.rates
        shape = model.shape
        work = LayerWork(model.rows, model.length, 1, model.rows * model.length, self.run.weight_bytes)
        passes = rates.layer(shape, 0, work).times(model.layers) + rates.head(shape, work)
        known = time.micro_batches * (passes.forward + passes.backward)
        if not time.zero:
            tensors = [parameter for parameter in stage_parameters(shape, pipeline_split(model.layers), 0)]
            values = sum(parameter.numel for parameter in tensors)
            known += rates.update("adamw", values, len(tensors))
            if self.measured.ranks > 1:
                ranks = self.measured.ranks
                links = [link for link in self.machine.calibration.links if link.ranks == link.group == ranks]
                exact = max(4, PRECISIONS[self.run.precision].size_bytes)
                known += link_seconds(links[0], "all_reduce", exact * values)
        return time.seconds - known


def _four_points(
    times: Sequence[WholeStepTime],
    rest: Callable[[WholeStepTime], float],
    values: float,
    micro_batches: int,
    share: float,
) -> float:
    """Return a + b M + N (c + d M) of N values and M micro batches, through the four measured points.

    share: the factor of what the small model takes, whose time hardly depends on its values.
    """
    lines = []
    for hidden in sorted({time.model.hidden for time in times}):
        one, several = sorted(
            (time for time in times if time.model.hidden == hidden), key=lambda time: time.micro_batches
        )
        slope = (rest(several) - rest(one)) / (several.micro_batches - one.micro_batches)
        slope = max(0.0, slope)
        shape = one.model.shape
        size = sum(p.numel for p in stage_parameters(shape, pipeline_split(one.model.layers), 0))
        lines.append((size, max(0.0, rest(one) - slope), slope))
    (small, *low), (large, *high) = lines
    place = (values - small) / (large - small)
    start, slope = (max(0.0, share * a + place * (b - a)) for a, b in zip(low, high, strict=True))
    return start + slope * micro_batches
