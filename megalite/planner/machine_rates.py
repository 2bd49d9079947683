"""Seconds of any product, layer, loss, update and collective on a calibrated machine, between the measured ones.

A time follows from the rate of the nearest measured sizes, interpolated between them in the logarithms of the sizes;
beyond the largest and the smallest size the rate stays.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import exp, log

from megalite.planner.calibration import (
    LinkKind,
    MeasuredLinks,
    MeasuredRanks,
    ModelTime,
    ProbeModel,
    ProductTime,
)
from megalite.topology.axes import Layout
from megalite.topology.parameters import Parameter, layer_parameters
from megalite.topology.place import RankPlace
from megalite.topology.shape import ModelShape

_LOW_RANK = "lora.A"


@dataclass(frozen=True)
class Passes:
    """Seconds of forward and backward. of_weights: the part of the backward that a split backward leaves for later."""

    forward: float = 0.0
    backward: float = 0.0
    of_weights: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            self.forward + other.forward,
            self.backward + other.backward,
            self.of_weights + other.of_weights,
        )

    def times(self, factor: float) -> "Passes":
        return Passes(factor * self.forward, factor * self.backward, factor * self.of_weights)


@dataclass(frozen=True)
class LayerWork:
    """The sizes of a micro batch on a rank. positions: those of the norms' tokens. tensor: ranks that share a layer."""

    rows: int
    length: int
    tensor: int
    positions: float
    value_bytes: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def traffic(shape: ModelShape, work: LayerWork) -> Passes:
    """Return the bytes that a layer's norms, rotations, activations and sums read and write."""
    heads = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    stream = shape.hidden_size * work.positions
    shared = work.tokens / work.tensor
    inner = shape.intermediate_size * shared * (1.5 if shape.gated_mlp else 1)
    return Passes(
        10 * stream + 2 * heads * shared + 2 * inner, 12 * stream + 2 * heads * shared + 3 * inner
    ).times(work.value_bytes)


def products_of(shape: ModelShape, layer: int, tensor: int) -> list[tuple[int, int, bool]]:
    """Return inputs, outputs and whether it is trained of each weight that a layer's tokens meet on the first rank."""
    return list(_products(layer_parameters(shape, layer), tensor))


def _products(parameters: Iterable[Parameter], tensor: int) -> Iterable[tuple[int, int, bool]]:
    place, low = RankPlace(Layout(tensor=tensor), 0), 0
    for parameter in parameters:
        size = place.local_shape(parameter)
        if parameter.name.endswith(_LOW_RANK):
            low = size[0]
        if len(size) == 2 and not parameter.name.endswith("prefix.weight"):
            # B of a fused weight has a block for each of its parts, which meet the outputs of A side by side.
            yield low if parameter.name.endswith("lora.B") else size[1], size[0], parameter.trained


class RankRates:
    """The rates of one rank while so many of its machine compute at once."""

    def __init__(self, measured: MeasuredRanks, value_bytes: int, *, queued: bool):
        """queued: an accelerator computes what the host has launched, so that the slower of both decides."""
        self.measured, self.value_bytes, self.queued = measured, value_bytes, queued
        self._products = _Grid(measured.products)

    def product(self, tokens: float, inputs: int, outputs: int, *, trained: bool) -> Passes:
        forward, of_inputs, of_weight = self._products.seconds(tokens, inputs, outputs)
        of_weight *= trained
        return Passes(forward, of_inputs + of_weight, of_weight)

    def attention(self, rows: int, length: int, heads: float, head_dim: int) -> Passes:
        """Return the seconds of causal attention over the whole sequence."""
        nearest = min(
            (time.head_dim for time in self.measured.attention), key=lambda dim: abs(log(dim / head_dim))
        )
        times = [
            time for time in self.measured.attention if time.head_dim == nearest
        ] or self.measured.attention
        size = rows * heads * length**2 * head_dim
        seconds = []
        for name in ("forward", "backward"):
            points = [
                (time.length, getattr(time, name) / (time.rows * time.heads * time.length**2 * time.head_dim))
                for time in times
            ]
            seconds.append(size * _between(points, length))
        return Passes(*seconds)

    def layer(self, shape: ModelShape, layer: int, work: LayerWork) -> Passes:
        """Return the seconds of a decoder layer without its collectives."""
        device = self.device_part(shape, layer, work)
        moved = _less(traffic(shape, work), self._least_traffic)
        rest = Passes(
            moved.forward * _between(self._traffic[0], moved.forward),
            moved.backward * _between(self._traffic[1], moved.backward),
        )
        adapters = sum(parameter.name.endswith(_LOW_RANK) for parameter in layer_parameters(shape, layer))
        return self.together(device + rest, self.host_layer + self._host_adapter.times(adapters))

    def device_part(self, shape: ModelShape, layer: int, work: LayerWork) -> Passes:
        """Return the seconds of a layer's products and attention."""
        total = self.attended(shape, layer, work)
        for inputs, outputs, trained in products_of(shape, layer, work.tensor):
            total += self.product(work.tokens, inputs, outputs, trained=trained)
        return total

    def attended(self, shape: ModelShape, layer: int, work: LayerWork) -> Passes:
        whole = self.attention(
            work.rows, work.length, shape.num_attention_heads / work.tensor, shape.head_dim
        )
        window = shape.window_of(layer)
        if window is None or window >= work.length:
            return whole
        return whole.times((2 * window - window**2 / work.length) / work.length)

    def together(self, device: Passes, host: Passes) -> Passes:
        """Return the seconds of a part from those of its device and of the launches."""
        if not self.queued:
            return device + host
        return Passes(
            max(device.forward, host.forward), max(device.backward, host.backward), device.of_weights
        )

    def head(self, shape: ModelShape, work: LayerWork, chunk: int = 0) -> Passes:
        """Return the seconds of embedding, final norm, head and loss. chunk: tokens of `model.chunked_loss`, or 0."""
        rows = -(-shape.vocab_size // work.tensor)
        at_once = min(chunk or work.tokens, work.tokens)
        device = self.product(at_once, shape.hidden_size, rows, trained=shape.adapter is None)
        device = device.times(work.tokens / at_once)
        values = max(0.0, work.tokens * rows - self._least_logits)
        return self.together(device + self._loss.times(values), self.host_head)

    def update(self, optimizer: str, values: float, tensors: int) -> float:
        """Return the seconds of the gradient's norm and the update of this rank's values."""
        small, large = sorted(
            (time for time in self.measured.updates if time.optimizer == optimizer),
            key=lambda time: time.values,
        )
        a_value = max(0.0, large.seconds - small.seconds * large.tensors / small.tensors) / (
            large.values - small.values * large.tensors / small.tensors
        )
        a_tensor = max(0.0, small.seconds - a_value * small.values) / small.tensors
        return a_value * values + a_tensor * tensors

    @cached_property
    def _pairs(self) -> list[tuple[ModelTime, ModelTime]]:
        return _paired(
            [time for time in self.measured.models if not (time.model.lora or time.model.recomputed)]
        )

    def waits_of_layer(self, links: MeasuredLinks, computing: Passes, crowd: float) -> Passes:
        """Return what the ranks of a group wait for each other in a layer, beyond the transfers of its sums.

        It grows with what they compute between the sums. computing: the seconds of the layer on one of them. crowd: how
        much slower the ranks of `links` compute than those of these rates.
        """
        points: list[tuple[Passes, Passes]] = []
        for one, several in _paired(links.models.get(self.measured.precision, ())):
            model, work = one.model, self._work(one.model, links.group)
            known = self.layer(model.shape, 0, work).times(crowd)
            hidden = work.tokens * model.hidden * self.value_bytes
            transfers = Passes(1, 1).times(2 * link_seconds(links, "all_reduce", hidden))
            points.append((known, _less(_difference(several, one), known + transfers)))
        return Passes(
            _on_line([(known.forward, wait.forward) for known, wait in points], computing.forward * crowd),
            _on_line([(known.backward, wait.backward) for known, wait in points], computing.backward * crowd),
        )

    @cached_property
    def host_layer(self) -> Passes:
        """The seconds of a layer of almost no tokens: launches, or the interpreter's work."""
        one, several = self._pairs[0]
        whole = _difference(several, one)
        return (
            whole
            if self.queued
            else _less(whole, self.device_part(one.model.shape, 0, self._work(one.model)))
        )

    @cached_property
    def _host_adapter(self) -> Passes:
        """The seconds that a low-rank adapter of one linear adds to `host_layer`."""
        for one, several in _paired([time for time in self.measured.models if time.model.lora]):
            shape, work = one.model.shape, self._work(one.model)
            adapters = sum(parameter.name.endswith(_LOW_RANK) for parameter in layer_parameters(shape, 0))
            known = self.host_layer if self.queued else self.host_layer + self.device_part(shape, 0, work)
            return _less(_difference(several, one), known).times(1 / adapters)
        return Passes()  # of a calibration that has not measured it

    @cached_property
    def host_recompute(self) -> Passes:
        """The seconds that recomputing adds to `host_layer` beside the recomputation; a card hides them."""
        if self.queued:
            return Passes()
        for one, several in _paired([time for time in self.measured.models if time.model.recomputed]):
            shape, work = one.model.shape, self._work(one.model)
            known = self.host_layer + self.device_part(shape, 0, work)
            known += Passes(0.0, self.attended(shape, 0, work).forward)
            return _less(_difference(several, one), known)
        return Passes()  # of a calibration that has not measured it

    @cached_property
    def host_head(self) -> Passes:
        one, several = self._pairs[0]
        rest = _less(Passes(one.forward, one.backward), _difference(several, one))
        model = one.model
        known = self.product(model.rows * model.length, model.hidden, model.vocabulary, trained=True)
        return rest if self.queued else _less(rest, known)

    @cached_property
    def _least_traffic(self) -> Passes:
        """The bytes whose time is part of `host_layer`."""
        model = self._pairs[0][0].model
        return traffic(model.shape, self._work(model))

    @cached_property
    def _least_logits(self) -> float:
        """The logits whose time is part of `host_head`."""
        return _logits(self._pairs[0][0].model)

    @cached_property
    def _traffic(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Bytes -> seconds a byte, forward and backward, of the rest of a layer."""
        forward, backward = [], []
        for one, several in self._pairs[1:]:
            work = self._work(one.model)
            moved = _less(traffic(one.model.shape, work), self._least_traffic)
            known = self.device_part(one.model.shape, 0, work)
            rest = _less(_difference(several, one), known if self.queued else known + self.host_layer)
            forward.append((moved.forward, rest.forward / moved.forward))
            backward.append((moved.backward, rest.backward / moved.backward))
        return forward, backward

    @cached_property
    def _loss(self) -> Passes:
        """The seconds of a logit in the loss, from the model of which the loss is the largest share.

        In the other models the loss would be the small difference of two long times.
        """
        one, several = max(self._pairs[1:], key=lambda pair: _logits(pair[0].model) / pair[0].forward)
        model = one.model
        known = self.product(model.rows * model.length, model.hidden, model.vocabulary, trained=True)
        rest = _less(Passes(one.forward, one.backward), _difference(several, one))
        rest = _less(rest, known if self.queued else known + self.host_head)
        return rest.times(1 / (_logits(model) - self._least_logits))

    def _work(self, model: ProbeModel, tensor: int = 1) -> LayerWork:
        return LayerWork(model.rows, model.length, tensor, model.rows * model.length, self.value_bytes)


def _paired(times: Sequence[ModelTime]) -> list[tuple[ModelTime, ModelTime]]:
    """Return the times of the same model with one layer and with more."""
    single = {_sizes(time.model): time for time in times if time.model.layers == 1}
    return [(single[_sizes(time.model)], time) for time in times if time.model.layers > 1]


def _sizes(model: ProbeModel) -> tuple[int, ...]:
    return (
        model.rows,
        model.length,
        model.hidden,
        model.intermediate,
        model.heads,
        model.vocabulary,
        model.lora,
        model.recomputed,
    )


def _logits(model: ProbeModel) -> float:
    return float(model.rows * model.length * model.vocabulary)


def _difference(several: ModelTime, one: ModelTime) -> Passes:
    """Return the seconds of a layer."""
    layers = several.model.layers - one.model.layers
    return Passes(several.forward - one.forward, several.backward - one.backward).times(1 / layers)


def _less(whole: Passes, known: Passes) -> Passes:
    return Passes(max(0.0, whole.forward - known.forward), max(0.0, whole.backward - known.backward))


def _between(points: Sequence[tuple[float, float]], place: float) -> float:
    """Return the value at a place between points (place, value), linear in the place's logarithm."""
    points = sorted(points)
    index = bisect_right([point for point, _ in points], place)
    if index in (0, len(points)):
        return points[max(0, index - 1)][1]
    (before, low), (after, high) = points[index - 1], points[index]
    share = log(place / before) / log(after / before)
    return low + share * (high - low)


def _on_line(points: Sequence[tuple[float, float]], place: float) -> float:
    """Return the value at a place on the line through two points (place, value), never below 0; 0 without them.

    Two points at the same place are no line: the second one counts.
    """
    if len(points) < 2:
        return 0.0
    (before, low), (after, high) = points
    slope = (high - low) / (after - before) if after != before else 0.0
    return max(0.0, high + slope * (place - after))


class _Grid:
    """The three products of a linear over tokens x inputs x outputs."""

    def __init__(self, times: Sequence[ProductTime]):
        self._axes = [
            sorted({getattr(time, name) for time in times}) for name in ("tokens", "inputs", "outputs")
        ]
        self._rates = {
            (time.tokens, time.inputs, time.outputs): [
                log(seconds / (time.tokens * time.inputs * time.outputs))
                for seconds in (time.forward, time.of_inputs, time.of_weight)
            ]
            for time in times
        }

    def seconds(self, *sizes: float) -> list[float]:
        """Return the seconds of the forward and of both backward products."""
        sides = [_side(axis, size) for axis, size in zip(self._axes, sizes, strict=True)]
        total = [0.0, 0.0, 0.0]
        for corner in product(*sides):
            share = 1.0
            for _, part in corner:
                share *= part
            if share:
                rates = self._rates[corner[0][0], corner[1][0], corner[2][0]]
                total = [sum_ + share * rate for sum_, rate in zip(total, rates, strict=True)]
        size = sizes[0] * sizes[1] * sizes[2]
        return [size * exp(rate) for rate in total]


def _side(axis: Sequence[int], size: float) -> list[tuple[int, float]]:
    """Return the neighbours of a size on an axis with their shares."""
    index = bisect_right(axis, size)
    if index in (0, len(axis)):
        return [(axis[max(0, index - 1)], 1.0)]
    before, after = axis[index - 1], axis[index]
    share = log(size / before) / log(after / before)
    return [(before, 1 - share), (after, share)]


def link_seconds(measured: MeasuredLinks, kind: LinkKind, size: float) -> float:
    """Return the seconds of a collective of so many bytes."""
    points = sorted((time.size, time.seconds) for time in measured.times if time.kind == kind)
    if not points:
        return link_seconds(measured, "all_gather", size)
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    for (before, low), (after, high) in pairwise(points):
        if size <= after:
            return low + (high - low) * (size - before) / (after - before)
    raise AssertionError("the points are sorted")
