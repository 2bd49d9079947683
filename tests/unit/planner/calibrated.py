"""A calibration of an imagined machine of two cores, whose every time follows from a few rates."""

from dataclasses import replace
from itertools import product

from megalite.planner.calibration import (
    AttentionTime,
    Calibration,
    LinkTime,
    MeasuredLinks,
    MeasuredRanks,
    ModelTime,
    ProbeModel,
    ProductTime,
    UpdateTime,
    WholeStepTime,
)
from megalite.planner.machine_rates import LayerWork, Passes, products_of, traffic
from megalite.topology.parameters import model_parameters
from megalite.topology.shape import ModelShape
from megalite.train.step.calibration_probes import Probes

PRODUCT, ATTENTION, BYTE, LOGIT, VALUE, LAYER, HEAD, STEP = 1e-10, 2e-11, 3e-10, 4e-9, 5e-9, 1e-4, 2e-4, 3e-3
"""Seconds of a multiplication in a product and in attention, of a byte of traffic, a logit, an updated value; of a
layer, a head and a step whatever their size."""
LATENCY, LINK_BYTE, ZERO_VALUE, ADAPTER, RECOMPUTED = 5e-5, 1e-9, 7e-9, 3e-5, 2e-5


SMALL, LARGE = ProbeModel(1, 16, 64, 64, 4, 5, 128), ProbeModel(1, 64, 128, 256, 4, 3, 512)
"""The small one's traffic and logits are part of what a layer and a head take whatever their size."""


_TINY, _WIDER = ProbeModel(1, 8, 16, 16, 4, 2, 32), ProbeModel(1, 8, 32, 16, 4, 2, 64)
PROBES = Probes(
    (4, 8),
    (4, 8),
    ((1, 8, 2, 4),),
    (_TINY, _WIDER),
    (_TINY, _WIDER),
    (_TINY, _WIDER),
    (_TINY, _WIDER),
    (64,),
    2,
)
"""Sizes that any device measures in a moment."""


def calibration(adapter: float = 0.0, waiting: float = 0.0) -> Calibration:
    """Return the measured machine.

    adapter: the seconds that an adapter of a linear adds, forward and backward each. waiting: the share of a layer's
    computation that ranks of a group wait for each other.
    """
    links = [
        MeasuredLinks(ranks, group, _links(), {"fp32": _shared(group, waiting)})
        for ranks, group in ((2, 2), (4, 4), (4, 2))
    ]
    computing = [_ranks(1, 2, adapter), _ranks(2, 1, adapter)]
    return Calibration("here", "cpu", 2, 2**34, "2.13.0", "fused", computing, links)


def _ranks(ranks: int, threads: int, adapter: float) -> MeasuredRanks:
    models = [_model_time(model) for model in _with_one_layer(SMALL, LARGE)]
    models += [_adapted(layers, adapter) for layers in (1, 5)]
    models += [_recomputed(layers) for layers in (1, 5)]
    sizes = product((16, 64), (16, 1024), (16, 1024))
    products = [ProductTime(*each, *[PRODUCT * each[0] * each[1] * each[2]] * 3) for each in sizes]
    attention = [
        AttentionTime(1, length, 4, 16, *(ATTENTION * factor * 4 * 16 * length**2 for factor in (1, 2)))
        for length in (16, 64)
    ]
    updates = [
        UpdateTime(name, values, 10, VALUE * values)
        for name in ("adamw", "lion", "sgd")
        for values in (10_000, 1_000_000)
    ]
    steps = [
        _step_time(model, micro_batches, zero, ranks)
        for zero in ((0, 1, 3) if ranks > 1 else (0,))
        for model in (SMALL, LARGE)
        for micro_batches in (1, 4)
    ]
    return MeasuredRanks(ranks, threads, "fp32", 1.0, products, attention, models, updates, steps)


def _with_one_layer(*models: ProbeModel) -> list[ProbeModel]:
    return [replace(model, layers=layers) for model in models for layers in (1, model.layers)]


def _shared(group: int, waiting: float) -> list[ModelTime]:
    """Return the times of the models on the ranks of a group that shares their layers."""
    times = []
    for model in _with_one_layer(SMALL, LARGE):
        tokens = model.rows * model.length
        work = LayerWork(model.rows, model.length, group, tokens, 4)
        layer = layer_passes(model.shape, work)
        whole = passes(model.shape, work)
        sums = 2 * (LATENCY + LINK_BYTE * 4 * tokens * model.hidden)
        forward, backward = (
            time + model.layers * (waiting * of_layer + sums)
            for time, of_layer in ((whole.forward, layer.forward), (whole.backward, layer.backward))
        )
        times.append(ModelTime(model, forward, backward))
    return times


def _links() -> list[LinkTime]:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "message")
    return [LinkTime(kind, size, LATENCY + LINK_BYTE * size) for kind in kinds for size in (1, 2**30)]  # type: ignore[arg-type]


def passes(shape: ModelShape, work: LayerWork) -> Passes:
    """Return the seconds of all layers, the head and the loss of a micro batch."""
    multiplied = (
        sum(inputs * outputs for inputs, outputs, _ in products_of(shape, 0, work.tensor)) * work.tokens
    )
    scores = work.rows * shape.hidden_size / work.tensor * work.length**2
    logits = work.tokens * shape.vocab_size / work.tensor
    moved, least = traffic(shape, work), traffic(SMALL.shape, LayerWork(SMALL.rows, SMALL.length, 1, 16, 4))

    def seconds(factor: int, moved_bytes: float) -> float:
        layer = LAYER + factor * (PRODUCT * multiplied + ATTENTION * scores) + BYTE * moved_bytes
        head = HEAD + factor * PRODUCT * shape.hidden_size * logits + LOGIT * (logits - 16 * SMALL.vocabulary)
        return shape.num_hidden_layers * layer + head

    return Passes(seconds(1, moved.forward - least.forward), seconds(2, moved.backward - least.backward))


def layer_passes(shape: ModelShape, work: LayerWork) -> Passes:
    one, two = (passes(replace(shape, num_hidden_layers=layers), work) for layers in (1, 2))
    return two + one.times(-1)


def _model_time(model: ProbeModel) -> ModelTime:
    tokens = model.rows * model.length
    time = passes(model.shape, LayerWork(model.rows, model.length, 1, tokens, 4))
    return ModelTime(model, time.forward, time.backward)


def _adapted(layers: int, adapter: float) -> ModelTime:
    """Return the time of layers with adapters, which alone are trained."""
    model = replace(SMALL, layers=layers, lora=4)
    scores = ATTENTION * SMALL.hidden * SMALL.length**2
    forward = backward = LAYER + 4 * adapter
    for inputs, outputs, trained in products_of(model.shape, 0, 1):
        forward += PRODUCT * SMALL.length * inputs * outputs
        backward += PRODUCT * SMALL.length * inputs * outputs * (1 + trained)
    return ModelTime(model, layers * (forward + scores), layers * (backward + 2 * scores))


def _recomputed(layers: int) -> ModelTime:
    """Return the time of layers whose attention is computed again, which takes RECOMPUTED beside the attention."""
    model = replace(SMALL, layers=layers, recomputed=True)
    time, again = _model_time(model), ATTENTION * SMALL.hidden * SMALL.length**2 + RECOMPUTED
    return ModelTime(model, time.forward, time.backward + layers * again)


def _step_time(model: ProbeModel, micro_batches: int, zero: int, ranks: int) -> WholeStepTime:
    time = _model_time(model)
    values = sum(parameter.numel for parameter in model_parameters(model.shape))
    rest = VALUE * values + (LATENCY + LINK_BYTE * 4 * values) * (ranks > 1)
    if zero:
        rest = ZERO_VALUE * values
    return WholeStepTime(
        model, micro_batches, zero, micro_batches * (time.forward + time.backward) + rest + STEP
    )
